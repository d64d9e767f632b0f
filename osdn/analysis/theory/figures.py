"""A figure for every statement, drawn from the same measurements as the checks."""

import math
from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from osdn.analysis.theory import population as pop
from osdn.analysis.theory import token_local as tok
from osdn.analysis.theory.runs import Problem, newton_problem, random_problem, run
from osdn.analysis.theory.suite import Config, with_retention

BLUE, ORANGE, GREEN, GREY = "#1f77b4", "#d95f02", "#1b9e77", "0.45"


def draw(config: Config, folder: Path) -> list[Path]:
    """Draw all figures into the folder, as SVG and PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    # with a fixed salt and no date, the same run draws the same bytes
    with matplotlib.rc_context(
        {"svg.hashsalt": "osdn", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
    ):
        for name, figure_of in FIGURES.items():
            figure = figure_of(config)
            for suffix, metadata in ((".svg", {"Date": None}), (".png", {})):
                paths.append(folder / (name + suffix))
                figure.savefig(paths[-1], metadata=metadata, dpi=120)
    return paths


def feedback(config: Config) -> Figure:
    """Lemma 1 and the descent corollary."""
    figure, (left, right) = _panels(2)
    p = random_problem(_generator(config), B=2, T=30, beta=(0.02, 0.98), backend=config.backend)
    inside = run(p)
    wide = run(p.with_(bounds=(0.5, 4.0), initial_scale=3.9 * p.start))
    x = torch.linspace(0, 3.9, 200)
    left.plot(x, ((1 - x) ** 2 - 1) / 2, color=GREY, label="closed form")
    for r, color, label in ((inside, BLUE, "box [0.5, 2]"), (wide, ORANGE, "box [0.5, 4]")):
        left.plot(r.step.flatten(), r.feedback.flatten(), ".", color=color, ms=4, label=f"measured, {label}")
        right.plot(r.step.flatten(), r.log_q.flatten().exp(), ".", color=color, ms=4, label=label)
    left.set(xlabel=r"$\beta\,\langle d, k^2\rangle$", ylabel="$h_t$", title="Lemma 1: the feedback")
    right.axhline(1, color=GREY, lw=1)
    right.axvspan(0, 2, color=BLUE, alpha=0.06)
    right.set(
        xlabel=r"$\beta\,\langle d, k^2\rangle$",
        ylabel="$f_t(S_t)/f_t(S_{t-1})$",
        title="Corollary: descent needs a box within (0, 2]",
    )
    _legends(left, right)
    return figure


def smoothness(config: Config) -> Figure:
    """The smoothness constant against the number of channels."""
    figure, (axes,) = _panels(1)
    generator, widths = _generator(config), (1, 2, 4, 8, 16, 32, 64)
    for K in widths:
        check = tok.smoothness(random_problem(generator, B=2, T=12, K=K, backend=config.backend))[1]
        axes.plot([K] * len(check.left), check.left.exp(), ".", color=BLUE, ms=4, alpha=0.5)
    axes.axhline(1, color=ORANGE, label="bound for unit keys")
    axes.plot(
        widths, [3 / (K + 2) for K in widths], color=GREY, label=r"$E\sum k^4$ of isotropic keys, $\beta=1$"
    )
    axes.set(
        xscale="log", yscale="log", xlabel="K", ylabel="$L_h$ measured", title="Smoothness of the feedback"
    )
    _legends(axes)
    return figure


def forgetting(config: Config) -> Figure:
    """The scale computed by the operator and by the affine map."""
    figure, (axes,) = _panels(1)
    p = random_problem(_generator(config), B=1, T=160, K=3, eta=0.05, backend=config.backend)
    for retention, color in ((1.0, BLUE), (0.99, GREEN), (0.95, ORANGE)):
        q = p.with_(retention=retention)
        scale = (q.scales()[0] / q.k)[0, :, 0]  # write keys are d * k
        axes.plot(
            tok.affine_scales(q)[0, :, 0, 0], color=color, lw=1, label=f"retention {retention:g}, affine map"
        )
        axes.plot(range(0, q.length, 8), scale[::8, 0], "o", color=color, ms=3)
    axes.axhline(0.5, color=GREY, lw=1, ls="--")
    axes.set(xlabel="token", ylabel="$d_1$", title="Forgetting: operator (dots) and affine map (lines)")
    _legends(axes)
    return figure


def theorem_1(config: Config) -> Figure:
    """Suboptimality of the ideal dynamics and its bounds, as T grows."""
    figure, (left, right) = _panels(2)
    population = pop.random_population(_generator(config), P=12)
    T = 40
    trajectory = pop.descend(population, T)
    progress = (trajectory.log_losses - trajectory.log_losses[:, :1]) / math.log(10)
    steps = torch.arange(1, T + 1)
    regret = (trajectory.feedback - trajectory.feedback_of(population.newton)).cumsum(1)
    bound = steps * (2 * population.smoothness[:, None] * regret / steps).log() / math.log(10)
    sharper = (
        steps
        * (2 * (population.smoothness * pop.bounded_regret(population))[:, None] / steps).log()
        / math.log(10)
    )
    for i, color in ((0, BLUE), (1, ORANGE), (2, GREEN)):
        left.plot(progress[i], color=color, label="measured" if i == 0 else None)
        left.plot(
            steps,
            bound[i],
            color=color,
            ls="--",
            lw=1,
            label="Theorem 1, regret incurred" if i == 0 else None,
        )
        left.plot(
            steps, sharper[i], color=color, ls=":", label="Theorem 1, bounded regret" if i == 0 else None
        )
    left.set(xlabel="T", ylabel=r"$\log_{10}\,(f(S_{T+1})-f^*)/(f(S_1)-f^*)$", title="Theorem 1 (3 problems)")
    right.plot(steps, (regret / pop.bounded_regret(population)[:, None]).T, color=BLUE, lw=1)
    right.axhline(1, color=ORANGE, label=r"$L\,\|D_1-\Sigma^+\|^2/2$")
    right.set(
        xlabel="T", ylabel="regret / its bound", ylim=(0, 1.1), title="The regret stays bounded (12 problems)"
    )
    _legends(left, right)
    return figure


def theorem_2(config: Config) -> Figure:
    """Both sides of the token-local bound, on many problems."""
    figure, (axes,) = _panels(1, width=7.0)
    generator = _generator(config)
    families = {"none": "DeltaNet", "scalar": "Gated DeltaNet", "channel": "KDA"}
    for (decay, title), color in zip(families.items(), (BLUE, ORANGE, GREEN)):
        for forgetful, marker in ((False, "o"), (True, "x")):
            problems = []
            for top in (0.3, 0.5, 0.7, 0.9, 0.98):
                p = random_problem(
                    generator, B=6, T=64, beta=(0.05, top), decay=decay, backend=config.backend
                )
                problems.append(with_retention(p, generator) if forgetful else p)
            checks = [tok.token_local_bound(p) for p in problems]
            left, right = (torch.cat([getattr(c, side) for c in checks]) for side in ("left", "right"))
            label = f"online-scaled {title}" + (", forgetting" if forgetful else "")
            axes.plot(right, left, marker, color=color, ms=4, ls="", label=label)
    ends = axes.get_xlim()
    axes.plot(ends, ends, color=GREY, lw=1, label="equality")
    axes.set(
        xlabel=r"$\log\,(2\varepsilon_T^{diag} + 2R_T/T)$",
        ylabel=r"$\frac{1}{T}\sum_t \log q_t$",
        title="Theorem 2: the left side stays below the right",
    )
    _legend_beside(axes)
    return figure


def newton_rate(config: Config) -> Figure:
    """The gated Newton case: geometric mean of q against T, with both bounds."""
    figure, (axes,) = _panels(1, width=7.0)
    generator, lengths = _generator(config), [2**i for i in range(3, 13)]
    longest = newton_problem(generator, B=8, T=lengths[-1], backend=config.backend)
    curves: dict[str, list[float]] = {}

    def add(label: str, value: Tensor) -> None:
        curves.setdefault(label, []).append(float(value.median().exp()))

    for T in lengths:
        p = longest.with_(k=longest.k[:, :T], v=longest.v[:, :T], beta=longest.beta[:, :T])
        textbook = tok.newton_rate(p.with_(eta=tok.textbook_eta(p)))
        add("textbook step", textbook.left)
        add(r"$2DG/\sqrt{T}$, the paper's", textbook.right)
        for eta, label in ((0.003, "step 0.003"), (1.0, "step 1")):
            check = tok.newton_constant_regret(p.with_(eta=eta))
            add(label, check.left)
            add(rf"$|d_1-d^*|^2/\eta(2-\eta L)T$, {label}", check.right)
    styles = (BLUE, "-"), (BLUE, "--"), (GREEN, "-"), (GREEN, "--"), (ORANGE, "-"), (ORANGE, "--")
    for (label, values), (color, style) in zip(curves.items(), styles):
        axes.plot(lengths, values, style, color=color, label=label, marker="." if style == "-" else "")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="T",
        ylabel="geometric mean of $q_t$",
        title="The gated Newton case",
    )
    _legend_beside(axes)
    return figure


def repeated_keys(config: Config) -> Figure:
    """Losses per class and their product against the product of the q_t."""
    figure, (axes,) = _panels(1)
    p, classes = tok.repeated_keys_problem(_generator(config), B=1, T=24)
    p = p.with_(backend=config.backend)
    product, curves = [0.0], {int(c): [0.0] for c in classes.unique()}
    log_q = run(p).log_q[0, :, 0].cumsum(0)
    for t in range(1, p.length + 1):
        state = run(p.with_(k=p.k[:, :t], v=p.v[:, :t], beta=p.beta[:, :t])).final_state[0, 0]
        for c, curve in curves.items():
            first = int((classes == c).nonzero()[0])
            k, v = p.k[0, first, 0], p.v[0, first, 0]
            curve.append(float(((k @ state - v).square().sum() / v.square().sum()).log()))
        product.append(sum(curve[-1] for curve in curves.values()))
    for c, curve in curves.items():
        axes.step(range(p.length + 1), curve, where="mid", lw=1, label=f"class {c}")
    axes.plot(product, color="black", label=r"$\log\prod_c F_c(S_t)/F_c(S_0)$")
    axes.plot(range(1, p.length + 1), log_q, "o", color=ORANGE, ms=4, label=r"$\sum \log q$")
    axes.set(xlabel="token", ylabel="log ratio", title="Repeated keys on disjoint channels")
    _legends(axes)
    return figure


def counter_example(config: Config) -> Figure:
    """Every token is solved; the global objective is not."""
    figure, (axes,) = _panels(1, width=7.0)
    T = 16
    _, r = tok.counter_example(T, backend=config.backend)
    states = [tok.counter_example(t, backend=config.backend)[1].final_state.item() for t in range(1, T + 1)]
    axes.plot(range(1, T + 1), r.problem.v.flatten(), "o", color=ORANGE, ms=7, mfc="none", label="$v_t$")
    axes.plot(range(1, T + 1), states, color=BLUE, marker=".", label="$S_t$")
    axes.plot(range(1, T + 1), r.after.flatten() / r.before.flatten(), color=GREEN, label="$q_t$")
    axes.axhline(0, color=GREY, lw=1, ls="--", label="the best fixed $S$")
    axes.set(xlabel="token", title="Every token is solved exactly, the stream is never learned")
    _legend_beside(axes)
    return figure


def decomposition(config: Config) -> Figure:
    """The parts of the regret, in both settings."""
    figure, (left, right) = _panels(2)
    generator = _generator(config)
    p = random_problem(generator, B=8, beta=(0.05, 0.6), backend=config.backend)
    _stacked_bars(left, tok.regret_decomposition(p))
    left.set(title="Token by token, along the operators", ylabel="regret")
    box, population = (0.5, 1.0), pop.random_population(generator, P=8)
    _stacked_bars(right, pop.population_decomposition(pop.descend(population, 64, box=box), box))
    right.set(title="Population limit, diagonal learner")
    _legends(right)
    return figure


def practical_step(config: Config) -> Figure:
    """The regret of a constant step grows with T if no single scale suits every token."""
    figure, (axes,) = _panels(1)
    lengths = [2**i for i in range(8, 16)]
    regrets: dict[str, list[float]] = {"constant step 0.003": [], "textbook step": []}
    for T in lengths:
        p = alternating_problem(T).with_(backend=config.backend)
        for label, eta in zip(regrets, (p.eta, tok.textbook_eta(p))):
            q = p.with_(eta=eta)
            regrets[label].append(float(run(q).regret(torch.full_like(q.start, ALTERNATING_BEST))))
    for (label, values), color in zip(regrets.items(), (ORANGE, BLUE)):
        axes.plot(lengths, values, ".-", color=color, label=label)
    root = [regrets["textbook step"][0] * math.sqrt(T / lengths[0]) for T in lengths]
    axes.plot(lengths, root, "--", color=GREY, lw=1, label=r"$\propto\sqrt{T}$")
    line = [regrets["constant step 0.003"][-1] * T / lengths[-1] for T in lengths]
    axes.plot(lengths, line, ":", color=GREY, label=r"$\propto T$")
    axes.set(
        xscale="log", yscale="log", xlabel="T", ylabel="regret", title="Gates 1, ½, 1, ½, …: a constant step"
    )
    _legends(axes)
    return figure


FIGURES: dict[str, Callable[[Config], Figure]] = {
    "feedback": feedback,
    "smoothness": smoothness,
    "forgetting": forgetting,
    "theorem_1": theorem_1,
    "theorem_2": theorem_2,
    "practical_step": practical_step,
    "newton_rate": newton_rate,
    "counter_example": counter_example,
    "repeated_keys": repeated_keys,
    "decomposition": decomposition,
}

ALTERNATING_BEST = 1.2  # minimises (1 - d)² + (1 - d/2)²


def alternating_problem(T: int) -> Problem:
    """One channel, k = 1, gates 1, ½, 1, ½, …, starting at the best fixed scale: steps only add regret."""
    ones = torch.ones(1, T, 1, 1, dtype=torch.float64)
    beta = (0.5 + 0.5 * (torch.arange(T) % 2 == 0)).double()[None, :, None]
    v = torch.randn(T, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[None, :, None, None]
    scale = torch.full((1, 1, 1), ALTERNATING_BEST, dtype=torch.float64)
    return Problem(ones, v, beta, initial_scale=scale)


def _stacked_bars(axes: Axes, parts: tok.Decomposition) -> None:
    order = parts.total.argsort()
    x, base = torch.arange(len(order)), torch.zeros_like(parts.total)
    for name, color in (("diagonal", GREY), ("box", ORANGE), ("online", BLUE)):
        values = getattr(parts, name)[order]
        axes.bar(
            x, values, bottom=base, color=color, label={"online": "online learner"}.get(name, f"{name} gap")
        )
        base = base + values
    axes.plot(x, parts.total[order], "k_", ms=12, label="total")
    axes.set(xlabel="problem")


def _panels(n: int, width: float = 4.6) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width * n, 3.4), layout="constrained")
    return figure, [figure.add_subplot(1, n, i + 1) for i in range(n)]


def _legends(*panels: Axes) -> None:
    for axes in panels:
        axes.legend(fontsize=7)


def _legend_beside(axes: Axes) -> None:
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def _generator(config: Config) -> torch.Generator:
    return torch.Generator().manual_seed(config.seed)
