"""Every statement of the paper on many random problems, and every hypothesis removed once.

`statements` are the checks in the paper's order; all of them should pass.  `violations` break one hypothesis
at a time: each check should report it, and `needed` says whether the relation should fail without it.
"""

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import osdn
from osdn.analysis.theory import newton as nwt
from osdn.analysis.theory import population as pop
from osdn.analysis.theory import token_local as tok
from osdn.analysis.theory.check import Check, merge
from osdn.analysis.theory.runs import Problem, newton_problem, random_problem


@dataclass(frozen=True)
class Config:
    """The settings of a run of the suite."""

    seed: int = 0
    problems: int = 32
    backend: str = "auto"


@dataclass(frozen=True)
class Violation:
    """A check on problems that break one hypothesis on purpose."""

    hypothesis: str
    check: Check
    needed: bool = True

    @property
    def as_expected(self) -> bool:
        return self.check.violated == [self.hypothesis] and self.check.holds != self.needed


@dataclass(frozen=True)
class Report:
    config: Config
    statements: list[Check]
    violations: list[Violation]
    model_statements: list[Check] = field(default_factory=list)  # on a model's own keys, if there was one

    @property
    def passed(self) -> bool:
        return all(c.passed for c in self.statements) and all(v.as_expected for v in self.violations)

    def summary(self) -> str:
        """One line: how many statements hold, and how many violations are detected."""
        passed, detected = sum(c.passed for c in self.statements), sum(v.as_expected for v in self.violations)
        return (
            f"{passed} of {len(self.statements)} statements hold, "
            f"{detected} of {len(self.violations)} violations are detected"
        )

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "theory.json"
        path.write_text(json.dumps(self._contents(), indent=2) + "\n")
        return path

    def _contents(self) -> dict[str, Any]:
        return {
            "versions": {
                "osdn": osdn.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "config": asdict(self.config),
            "passed": self.passed,
            "statements": [check.summary() for check in self.statements],
            "model_statements": [check.summary() for check in self.model_statements],
            "violations": [
                {
                    "hypothesis": v.hypothesis,
                    "needed": v.needed,
                    "as_expected": v.as_expected,
                    **v.check.summary(),
                }
                for v in self.violations
            ],
        }


def run_suite(config: Config) -> Report:
    return Report(config, statements(config), violations(config))


def statements(config: Config) -> list[Check]:
    """The paper's statements, in its order."""
    generator = torch.Generator().manual_seed(config.seed)
    B, backend = config.problems, config.backend
    plain = random_problem(generator, B=B, backend=backend)
    families = [
        plain,
        random_problem(generator, B=B, T=37, K=9, V=2, decay="scalar", backend=backend),
        random_problem(generator, B=B, T=20, K=3, V=7, decay="channel", backend=backend),
    ]
    forgetting = [with_retention(p, generator) for p in families]
    newton = newton_problem(generator, B=B, T=256, backend=backend)

    def over(check: Callable[[Problem], Check], problems: list[Problem]) -> Check:
        return merge([check(p) for p in problems])

    smooth = [tok.smoothness(p) for p in families]
    return [
        over(tok.closed_form, families + forgetting),
        over(tok.phase_one_descends, families),
        *(merge(checks) for checks in zip(*smooth)),
        over(tok.monotone_descent, families + forgetting),
        over(tok.affine_forgetting, families + forgetting),
        *population_statements(generator, B),
        over(tok.token_local_bound, families + forgetting),
        over(tok.online_regret, families),
        over(tok.textbook_regret, [p.with_(eta=tok.textbook_eta(p)) for p in families]),
        tok.newton_rate(newton.with_(eta=tok.textbook_eta(newton))),
        over(tok.newton_constant_regret, [newton, newton.with_(eta=1.0)]),
        tok.counter_example(backend=config.backend)[0],
        tok.repeated_keys(*tok.repeated_keys_problem(generator, B)),
        tok.regret_decomposition(plain).check("Regret in three parts, tokens"),
        *newton_statements(generator, B, backend),
    ]


def newton_statements(generator: torch.Generator, B: int, backend: str) -> list[Check]:
    """Newton scaling with diagonal, block-diagonal and full covariances."""
    problems = [nwt.random_problem(generator, B, block_size, backend=backend) for block_size in (1, 2, 6)]
    forgets_nothing = replace(problems[2], retention=torch.ones_like(problems[2].retention))
    bounds = [nwt.covariance_bounds(p) for p in problems]
    return [
        *(merge(list(checks)) for checks in zip(*bounds)),
        merge([nwt.no_overshoot(p) for p in problems]),
        nwt.ridge_regression(forgets_nothing),
    ]


def population_statements(generator: torch.Generator, P: int) -> list[Check]:
    keys = torch.randn(P, 12, 4, generator=generator, dtype=torch.float64)
    values = torch.randn(P, 12, 3, generator=generator, dtype=torch.float64)
    ends = torch.randn(2, P, 4, 4, generator=generator, dtype=torch.float64)
    full, thin = pop.random_population(generator, P), pop.random_population(generator, P, rank=2)
    runs = [pop.descend(full, 64), pop.descend(thin, 12)]
    box = (0.5, 1.0)
    lemmas = [pop.optimal_feedback(r) for r in runs]
    return [
        pop.exact_quadratic(keys, values),
        pop.convex_feedback(runs[0], *ends),
        *(merge(checks) for checks in zip(*lemmas)),
        merge([pop.population_bound(r) for r in runs]),
        merge([pop.constant_regret(r) for r in runs]),
        pop.population_decomposition(pop.descend(full, 64, box=box), box).check(
            "Regret in three parts, population"
        ),
    ]


def with_retention(problem: Problem, generator: torch.Generator) -> Problem:
    """The problem with adaptive forgetting: a retention between 0.9 and 1 for every token."""
    uniform = torch.rand(problem.beta.shape, generator=generator, dtype=torch.float64)
    return problem.with_(retention=0.9 + 0.1 * uniform)


# ------------------------------------------------------------------------ every hypothesis, broken on purpose


def violations(config: Config) -> list[Violation]:
    generator = torch.Generator().manual_seed(config.seed)
    p = random_problem(generator, B=8, backend=config.backend)
    return [
        *feedback_violations(p),
        *bound_violations(p, generator),
        *repeated_key_violations(generator),
        *population_violations(generator),
        *newton_violations(generator, config.backend),
    ]


def newton_violations(generator: torch.Generator, backend: str) -> list[Violation]:
    p = nwt.random_problem(generator, 8, 1, backend=backend)
    signed = replace(p, beta=p.beta - 2.5)
    growing = replace(p, retention=p.retention + 0.3, beta=0.02 * p.beta)
    return [
        Violation(nwt.POSITIVE, nwt.covariance_bounds(signed)[1]),
        Violation(nwt.KEPT, nwt.covariance_bounds(growing)[0]),
        Violation(nwt.POSITIVE, nwt.no_overshoot(signed)),
        Violation(nwt.RETAINED, nwt.ridge_regression(p)),
    ]


def feedback_violations(p: Problem) -> list[Violation]:
    axis = F.one_hot(torch.arange(p.length) % p.k.shape[-1], p.k.shape[-1]).to(p.k)[:, None].expand_as(p.k)
    long, short = p.with_(k=3 * p.k), p.with_(k=1e-4 * p.k)
    strong = p.with_(k=axis, beta=torch.full_like(p.beta, 1.5))
    wide = p.with_(bounds=(0.5, 4.0), initial_scale=3.9 * p.start)
    return [
        Violation(tok.RESIDUAL, tok.closed_form(p.with_(v=torch.zeros_like(p.v)))),
        Violation(tok.FLOOR, tok.phase_one_descends(short)),
        Violation(tok.RETENTION, tok.phase_one_descends(p.with_(retention=0.9))),
        Violation(tok.BETA_AWARE, tok.phase_one_descends(p.with_(beta_aware=False))),
        Violation(tok.UNIT, tok.smoothness(long)[1]),
        Violation(tok.GATE, tok.smoothness(strong)[1]),
        Violation(tok.UNIT, tok.monotone_descent(long)),
        Violation(tok.GATE, tok.monotone_descent(p.with_(beta=p.beta + 1.5))),
        Violation(tok.BOX, tok.monotone_descent(wide)),
        Violation(tok.START, tok.monotone_descent(p.with_(initial_scale=9 * p.start))),
    ]


def bound_violations(p: Problem, generator: torch.Generator) -> list[Violation]:
    far = 1.9 * p.start
    newton = newton_problem(generator, d_star=far, B=8, T=2048, backend=p.backend)
    textbook = newton.with_(eta=tok.textbook_eta(newton))
    weak = random_problem(generator, B=8, T=2048, beta=(0.02, 0.4), backend=p.backend)
    axis = F.one_hot(torch.zeros(p.length, dtype=torch.long), p.k.shape[-1]).to(p.k)[:, None].expand_as(p.k)
    overshooting = p.with_(k=axis, beta=torch.full_like(p.beta, 0.9), eta=2.6)
    half = torch.full_like(p.start[..., 0], -p.length / 2)
    return [
        Violation(tok.UNIT, tok.token_local_bound(p.with_(k=2 * p.k))),
        Violation(tok.REGRET, tok.token_local_bound(p, regret=half)),
        Violation(tok.COMPARATOR, tok.token_local_bound(p, d=3 * p.start), needed=False),
        Violation(tok.RETENTION, tok.online_regret(newton.with_(retention=0.9, eta=0.03))),
        Violation(tok.BETA_AWARE, tok.online_regret(newton.with_(beta_aware=False, eta=0.03))),
        Violation(tok.TEXTBOOK, tok.textbook_regret(newton.with_(eta=1e-5))),
        Violation(tok.START, tok.textbook_regret(textbook.with_(initial_scale=50 * newton.start))),
        Violation(tok.NEWTON, tok.newton_rate(weak.with_(eta=tok.textbook_eta(weak)))),
        Violation(tok.NEWTON, tok.newton_constant_regret(weak.with_(eta=1.0))),
        Violation(tok.STEP_SIZE, tok.newton_constant_regret(overshooting)),
    ]


def repeated_key_violations(generator: torch.Generator) -> list[Violation]:
    p, classes = tok.repeated_keys_problem(generator)
    K = p.k.shape[-1]
    turn = torch.linalg.qr(torch.randn(K, K, generator=generator, dtype=torch.float64)).Q
    drifting = p.v + 0.1 * torch.arange(p.length, dtype=torch.float64)[:, None, None]
    solved = p.v * (classes != classes[0])[:, None, None]  # an empty state already answers 0
    fading = torch.full_like(p.beta, -0.1)
    return [
        # orthogonal keys are not enough: they do not stay orthogonal under a diagonal scale
        Violation(tok.DISJOINT, tok.repeated_keys(p.with_(k=p.k @ turn, eta=0.5), classes)),
        Violation(tok.CLASSES, tok.repeated_keys(p.with_(v=drifting), classes)),
        Violation(tok.NO_DECAY, tok.repeated_keys(p.with_(log_decay=fading), classes)),
        Violation(tok.RESIDUAL, tok.repeated_keys(p.with_(v=solved), classes)),
    ]


def population_violations(generator: torch.Generator) -> list[Violation]:
    population = pop.random_population(generator)
    run = pop.descend(population, 16)
    first = torch.eye(4, dtype=torch.float64) / population.smoothness[:, None, None]
    leap = pop.descend(population, 16, first=3 * first)
    too_little = run.regret(population.newton) / 100
    return [
        Violation(pop.MONOTONE, pop.population_bound(leap), needed=False),
        Violation(pop.NEWTON, pop.population_bound(run, comparator=first)),
        Violation(pop.REGRET, pop.population_bound(run, regret=too_little)),
    ]
