"""Results: one reader, one identity, one look.

Every measurement is saved as a JSON file (`store.save_json`).  Everything that shows results, in the
terminal, in files or on a page, reads those files with `store.read_results` and renders them with `tables`,
`plots` and `page`.
"""
