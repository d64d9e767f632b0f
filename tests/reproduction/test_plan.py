"""Plans: what is run, whether it is done, and that every command and config is a real one."""

import json
import shlex
import sysconfig
from dataclasses import replace
from importlib.metadata import version
from itertools import islice

import pytest
import typer
from packaging.requirements import Requirement

from osdn.cli import app
from osdn.models import describe
from osdn.reproduction.finished import PROTOCOL, save_speeds
from osdn.reproduction.plan import Plan
from osdn.reproduction.profiles import (
    BEST,
    BLOCKS,
    DELTA_NET,
    LAPTOP,
    MINUTES,
    PROFILES,
    STEADY,
    STILL,
    paper_commands,
)
from osdn.reproduction.runner import Layout, Machine, plan_table
from osdn.reproduction.text import exercises, frequent_words, primer
from osdn.results.store import environment
from osdn.training.data import SourceFiles, load_source
from osdn.training.settings import load_settings


def parse(arguments):
    """What `osdn` makes of its arguments, without running anything; a wrong option is an error."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command, arguments = command.commands[arguments[0]], arguments[1:]
    return command.make_context(command.name, list(arguments)).params


@pytest.fixture(autouse=True)
def installation(tmp_path_factory, monkeypatch):
    """A small one, of four hundred files: a walk through the real one takes seconds."""
    root = tmp_path_factory.mktemp("python")
    for i in range(400):
        size = 1000 if i % 3 == 0 else 20  # lines; some are long enough for a book
        (root / f"module{i}.py").write_text(
            "".join(f"value_{i}_{n} = compute({n}, {i})\n" for n in range(size))
        )
    paths = {"stdlib": str(root), "purelib": str(root / "none")}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)


@pytest.fixture(params=PROFILES.values(), ids=lambda profile: profile.name)
def plan(request, tmp_path):
    built = Plan(request.param, tmp_path)
    built.begin()
    return built


def test_every_command_parses_and_every_config_loads(plan):
    for chain in plan.chains("float32"):
        assert [job.kind for job in chain] == ["train", "evaluate", "diagnose"]
        arguments = parse(chain[0].arguments)
        settings = load_settings(arguments["config"], arguments["replace"])
        assert settings.training.steps == plan.profile.steps
        assert settings.output_dir == str(chain[0].leaves[0][0].parent)
        assert f"seed{settings.training.seed}" in settings.output_dir
        assert parse(chain[1].arguments)["checkpoint"] == f"{settings.output_dir}/model"
        assert parse(chain[2].arguments)["window"] == plan.profile.window
        assert not any(job.is_done() for job in chain)
    for job in plan.throughput("float32"):
        parse(job.arguments)
    parse(plan.vocabulary().arguments)


def test_models_are_what_their_names_say(plan):
    configs = {model: load_settings(plan.config(model)).model_config() for model in plan.profile.seeds}
    sizes = [describe(config).parameters for config in configs.values()]
    assert max(sizes) < 1.1 * min(sizes)
    if plan.profile is LAPTOP:
        assert 1e6 < min(sizes) < max(sizes) < 3e6
        assert configs["delta_net bias=-2"].beta_bias == -2
        assert configs["osdn-newton-block-8"].preconditioner["block_size"] == 8
        assert configs[STEADY].preconditioner == {**configs[BEST].preconditioner, "retention": 0.999}
        assert configs[STILL].preconditioner == {**configs["osdn-apf"].preconditioner, "eta": 0.0}
        assert configs["osgdn-apf"].preconditioner["retention"] == "tied"
        assert configs["osdn-d0-free"].preconditioner["initial_scale"] == "free"


def test_the_laptop_has_every_model_with_enough_seeds():
    assert set(LAPTOP.seeds) == {model for models in BLOCKS.values() for model in models}
    assert min(LAPTOP.seeds.values()) >= 3
    assert all(LAPTOP.seeds[model] >= 6 for model in DELTA_NET)
    assert len(set(LAPTOP.runs)) == sum(LAPTOP.seeds.values())
    assert {seed for _, seed in LAPTOP.runs[: len(LAPTOP.seeds)]} == {0}  # a first seed of all comes first


def test_more_seeds_never_means_fewer():
    more = LAPTOP.with_seeds(5)
    assert {more.seeds[model] for model in DELTA_NET} == {6}
    assert {more.seeds[model] for model in LAPTOP.seeds if model not in DELTA_NET} == {5}
    assert LAPTOP.with_seeds(1) == LAPTOP


def test_a_job_is_done_when_its_file_says_so(tmp_path):
    job = Plan(MINUTES, tmp_path).training("osdn", 1, "float32")
    path = job.leaves[0][0]
    path.parent.mkdir(parents=True)
    for text, done in (
        ("", False),
        ("{}", False),
        ('{"finished": false}', False),
        ('{"finished": true}', True),
    ):
        path.write_text(text)
        assert job.is_done() == done
    path.with_name("metrics.jsonl").write_text('{"step": 5, "loss": 1}\n{"step": 10, "loss": 1}\n{"st')
    assert job.share() == 10 / MINUTES.steps


def test_a_folder_of_another_profile_or_text_is_refused(tmp_path, monkeypatch):
    Plan(MINUTES, tmp_path).begin()
    Plan(MINUTES, tmp_path).begin()
    with pytest.raises(ValueError, match="holds a run of another profile; choose another --output"):
        Plan(replace(MINUTES, steps=41), tmp_path).begin()
    monkeypatch.setattr(SourceFiles, "fingerprint", "other")
    with pytest.raises(ValueError, match="the text has changed since"):
        Plan(MINUTES, tmp_path).begin()


def test_a_folder_can_be_continued_with_more_seeds(tmp_path):
    Plan(MINUTES, tmp_path).begin()
    for model, seed in MINUTES.runs:
        finished = Plan(MINUTES, tmp_path).finished(model, seed)
        finished.parent.mkdir(exist_ok=True)
        finished.write_text("{}")
    more = Plan(MINUTES.with_seeds(4), tmp_path)
    more.begin()
    assert [chain[0].of for chain in more.chains("float32")] == [
        f"{model}, seed {seed}" for seed in (2, 3) for model in MINUTES.seeds
    ]
    Plan(replace(MINUTES, repeats=9), tmp_path).begin()


def test_a_folder_that_comes_without_its_large_files_gets_the_same_text_again(tmp_path):
    plan = Plan(MINUTES, tmp_path)
    plan.begin()
    text = plan.text.read_bytes()
    plan.text.unlink()
    plan.begin()
    assert plan.text.read_bytes() == text
    (tmp_path / "reproduction.json").unlink()  # as if it had been killed just before
    plan.begin()
    assert plan.text.read_bytes() == text


def test_the_packages_behind_the_text_are_listed_as_pip_reads_them(tmp_path):
    Plan(MINUTES, tmp_path).begin()
    lines = (tmp_path / "requirements.txt").read_text().splitlines()
    assert f"torch=={version('torch')}" in lines
    assert all(Requirement(line).name != "osdn" for line in lines)


def test_a_finished_run_needs_no_commands_and_no_weights(tmp_path):
    plan = Plan(MINUTES, tmp_path)
    plan.begin()
    plan.finished("osdn", 0).parent.mkdir()
    plan.finished("osdn", 0).write_text("{}")
    chains = plan.chains("float32")
    assert len(chains) == len(MINUTES.runs) - 1
    assert not any(job.of == "osdn, seed 0" for chain in chains for job in chain)
    stand_in, timing = plan.throughput("float32")
    settings = load_settings(*(parse(stand_in.arguments)[key] for key in ("config", "replace")))
    assert settings.training.steps == 1
    assert settings.model_config().preconditioner["eta"] == 0.003
    assert f"{settings.output_dir}/model" in timing.arguments
    (plan.run_folder("osdn", 0) / "model").mkdir(parents=True)
    assert [job.kind for job in plan.throughput("float32")] == ["time"]
    assert parse(timing.arguments)["repeats"] == MINUTES.repeats
    rows = [
        {"model": model, "compared_with": base, "times_ms": times, "checkpoint": "/home/a/model"}
        for model, base, times in (
            ("delta_net", None, [[10.0, 20.0], [11.0, 29.0]]),
            ("osdn", "delta_net", [[20.0, 40.0], [10.0, 22.0]]),
        )
    ]
    timed = {**dict.fromkeys(PROTOCOL), "repeats": 2, "rows": rows}
    (tmp_path / "throughput.json").write_text(json.dumps(timed))
    save_speeds(plan)
    assert plan.throughput("float32") == []
    assert json.loads(plan.speeds.read_text())["models"] == {"delta_net": {}, "osdn": {"changes": [-50, 25]}}
    assert "/home/a" not in plan.speeds.read_text()  # it is a file to commit


@pytest.mark.parametrize("here", [True, False])
def test_the_hours_say_on_which_machine_they_were_measured(tmp_path, here):
    plan = Plan(MINUTES, tmp_path)
    jobs = [job for chain in plan.chains("float32") for job in chain]
    cpu = environment()["machine"]["cpu"] if here else "Another 8000"
    seconds = {"train delta_net": 3600.0, "evaluate": 72.0, "diagnose": 36.0}
    table = plan_table(plan, Machine(Layout(2, 1), "float32", [], seconds, cpu), jobs)
    assert table.rows[-1].cells[-1].text == "3.09"  # six of each, two at once
    assert ("on this machine." in table.note) == here
    assert ("on another machine (Another 8000), where" in table.note) != here


def test_the_papers_commands_are_real():
    lines = [line for line in paper_commands() if not line.startswith("#")]
    assert sum("train 340m/" in line for line in lines) == 11
    assert sum("train 1.3b/" in line for line in lines) == 2
    for line in lines:
        words = shlex.split(line)
        arguments = words[1:] if words[0] == "osdn" else words[words.index("osdn") + 1 :]
        options = parse(arguments)
        if arguments[0] == "train":
            settings = load_settings(options["config"])
            assert settings.output_dir == f"runs/{arguments[1]}"


def test_books_are_long_held_out_files(tmp_path):
    from osdn.evaluation.perplexity import BLOCK
    from osdn.training.data import load_tokenizer

    load_tokenizer("bytes").save_pretrained(tmp_path / "tokenizer")
    plan = Plan(MINUTES, tmp_path)
    plan.write_books()
    held_out = list(SourceFiles("installed").texts("validation"))
    books = sorted(plan.books.iterdir())
    assert len(books) == MINUTES.books
    for book in books:
        text = book.read_bytes().decode()
        assert BLOCK <= len(load_tokenizer("bytes")(text, verbose=False).input_ids) < BLOCK + 20
        assert sum(whole.startswith(text) for whole in held_out) == 1
    with pytest.raises(
        ValueError, match=r"have \d+ held-out files of 20,480 tokens, and the profile asks for"
    ):
        Plan(replace(MINUTES, books=100), tmp_path).write_books()


def test_what_the_folder_is_for_is_written_down(plan):
    content = json.loads((plan.folder / "reproduction.json").read_text())
    assert content["profile"]["name"] == plan.profile.name
    assert content["text"]["fingerprint"] == SourceFiles("installed").fingerprint


def test_exercises_ask_for_lines_of_their_excerpt():
    text = "".join(f"first_{i} = compute({i})\ndef then_{i}(a{i}, b={i}):\n    pass\n" for i in range(200))
    readings = set()
    for exercise in exercises(text):
        excerpt, *lines = exercise.split("\n\n")  # the file has no empty lines
        assert excerpt in text
        readings.add(1 + lines.count(excerpt))
        lines = [line for line in lines if line != excerpt]
        assert 1 <= len(set(lines)) == len(lines) <= 4
        assert all(line in map(str.strip, excerpt.splitlines()) for line in lines)
    assert readings == {1, 2}
    assert list(exercises(text)) == list(exercises(text))
    assert not list(exercises("nothing to ask for\n" * 100))


def test_the_primer_lists_random_words_twice():
    words = frequent_words(iter(["x = the a the of", "if of the the not_a_word THE"]), 2)
    assert words == ["the", "of"]
    words = [f"word{i}" for i in range(256)]
    texts = list(primer(words, 50_000))
    lists = [text.split() for text in texts]
    halves = [len(listed) // 2 for listed in lists]
    assert all(listed[:half] == listed[half:] for listed, half in zip(lists, halves))
    assert all(text.startswith(" word") for text in texts)  # so that a word's tokens are the same everywhere
    assert 50_000 <= sum(len(listed) + 1 for listed in lists) < 50_000 + 121
    easy = len(lists) // 4
    assert (min(halves), max(halves[:easy])) == (3, 12)
    assert 50 < max(halves) <= 60
    assert {word for listed in lists[:easy] for word in listed} == set(words[:32])
    assert len({word for listed in lists for word in listed}) > 240
    assert not list(primer(words, 0))


def test_the_text_is_a_sample_of_the_files(plan):
    begun = json.loads((plan.folder / "reproduction.json").read_text())["text"]
    texts = [json.loads(line)["text"] for line in plan.text.read_text().splitlines()]
    assert len(texts) == begun["training"] + begun["validation"]
    training, held_out = texts[: begun["training"]], texts[begun["training"] :]
    files = SourceFiles("installed")
    if plan.profile is MINUTES:  # else it is all there is
        assert 0 <= sum(map(len, training)) - 4 * plan.profile.tokens < 40_000
        assert 0 <= sum(map(len, held_out)) - 4 * plan.profile.validation_tokens < 40_000
    assert training[0] != held_out[0]
    assert training[0].startswith(" ")
    words = next(i for i, text in enumerate(training) if not text.startswith(" "))
    training = training[words:]
    plain = [text for text in training if "\n\n" not in text]  # these files have no empty lines
    practised = [text for text in training if "\n\n" in text]
    assert set(plain) < set(files.texts("train"))
    assert practised
    assert not any(exercise.partition("\n\n")[0] in text for exercise in practised for text in plain)
    if plan.profile is MINUTES:  # the laptop's runs would read more files than there are
        share = sum(map(len, practised)) / sum(map(len, training))
        assert abs(share - plan.profile.exercises) < 0.05
    assert held_out == list(islice(files.texts("validation"), len(held_out)))
    settings = load_settings(plan.config("osdn"))
    assert len(load_source(settings.data.source, split=settings.data.split)) == begun["training"]
    assert load_source(settings.data.source, split=settings.validation.split)["text"][0] == held_out[0]
