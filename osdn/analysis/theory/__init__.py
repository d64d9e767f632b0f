"""The paper's theory as code: every statement is measured on runs of the operators.

`token_local` holds the statements about the implemented update, `population` those about its idealised limit,
`newton` those about Newton scaling; `runs` defines the problems and measures the operators on them; `suite`
is what `osdn theory` runs.  `docs/theory.md` walks through the statements.
"""

from osdn.analysis.theory.check import Check
from osdn.analysis.theory.population import Population, descend, population_bound, random_population
from osdn.analysis.theory.runs import (
    Problem,
    Run,
    best_fixed_scale,
    newton_problem,
    random_problem,
    run,
)
from osdn.analysis.theory.suite import Config, Report, run_suite
from osdn.analysis.theory.token_local import (
    affine_forgetting,
    closed_form,
    counter_example,
    monotone_descent,
    newton_constant_regret,
    newton_rate,
    online_regret,
    phase_one_descends,
    regret_decomposition,
    repeated_keys,
    smoothness,
    textbook_regret,
    token_local_bound,
)

__all__ = [
    "Check",
    "Config",
    "Population",
    "Problem",
    "Report",
    "Run",
    "affine_forgetting",
    "best_fixed_scale",
    "closed_form",
    "counter_example",
    "descend",
    "monotone_descent",
    "newton_constant_regret",
    "newton_problem",
    "newton_rate",
    "online_regret",
    "phase_one_descends",
    "population_bound",
    "random_population",
    "random_problem",
    "regret_decomposition",
    "repeated_keys",
    "run",
    "run_suite",
    "smoothness",
    "textbook_regret",
    "token_local_bound",
]
