"""The operators against their peers: `osdn bench ops` as a script, with the same options."""

from osdn.analysis.bench_ops import main

if __name__ == "__main__":
    main()
