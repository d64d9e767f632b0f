"""Looking into models and their theory: residual ratios, the paper's statements, tables and figures."""
