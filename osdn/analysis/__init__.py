"""Analysis of models and of the theory: residual ratios, and the paper's statements checked numerically."""
