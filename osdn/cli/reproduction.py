"""`osdn reproduce`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osdn.extras import require
from osdn.terminal import console, messages, plain_errors, show, writable_folder

if TYPE_CHECKING:
    from osdn.reproduction.profiles import Profile


def reproduce(
    profile: Annotated[
        str,
        typer.Option(help="minutes (a smoke run), laptop (four to nine hours), or paper (only prints)."),
    ] = "laptop",
    output: Annotated[
        Path | None, typer.Option(help="Folder of the runs; runs/reproduce/PROFILE if not given.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="At least so many seeds of every model; a finished folder can get more."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Only make the report again, from the results.json in this folder.")
    ] = None,
) -> None:
    """Measure the paper's tables at laptop scale; started again, it continues."""
    from osdn.reproduction.profiles import PROFILES, paper_commands

    with plain_errors():
        if report is not None:
            _write(report)
            return
        if profile == "paper":
            for line in paper_commands():
                print(line)
            return
        if profile not in PROFILES:
            raise ValueError(f"profile is {profile!r}; it must be one of {', '.join(PROFILES)}, paper")
        folder = writable_folder(output or Path("runs/reproduce") / profile).resolve()
        chosen = PROFILES[profile] if seeds is None else PROFILES[profile].with_seeds(seeds)
    _run(chosen, folder)
    with plain_errors():
        _write(folder)


def _run(profile: "Profile", folder: Path) -> None:
    require("osdn reproduce", "lab,eval", "transformers", "datasets", "lm_eval", "matplotlib")
    from osdn.reproduction.plan import Plan
    from osdn.reproduction.results import collect, save
    from osdn.reproduction.runner import JobError
    from osdn.reproduction.runner import reproduce as run

    plan = Plan(profile, folder)
    try:
        with plain_errors(JobError):
            run(plan, messages, show)
            save(collect(plan), folder)
    except KeyboardInterrupt:
        messages.print(f"stopped; the same command continues from what is in {folder}", soft_wrap=True)
        raise typer.Exit(130) from None


def _write(folder: Path) -> None:
    require("osdn reproduce", "lab", "matplotlib")
    from osdn.reproduction.claims import findings
    from osdn.reproduction.report import HEADINGS, write_report
    from osdn.reproduction.results import load

    content = load(folder)
    page, *others = write_report(content, folder)
    verdicts = [finding.verdict for finding in findings(content)]
    for verdict, heading in HEADINGS.items():
        console.print(f"{verdicts.count(verdict):3} claims: {heading.lower()}", highlight=False)
    console.print(f"{page}; beside it {', '.join(path.name for path in others)}", soft_wrap=True)
