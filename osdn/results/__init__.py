"""Results: one reader, one identity, one look.

Whatever is measured becomes a JSON file (`store.save_json`).  Everything that shows results, in the terminal,
in files or on a page, reads those files through `store.read_results` and sets them with `tables`, `plots` and
`page`.
"""
