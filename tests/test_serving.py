"""`osdn serve`, tested with OpenAI's own client."""

import socket
import subprocess
import sys

import openai
import pytest
import torch
from typer.testing import CliRunner

from osdn import OSDNConfig, OSDNForCausalLM
from osdn.cli import app
from osdn.serving import bind
from osdn.training.data import load_tokenizer

PROMPT = "def f(x):"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "tiny"
    torch.manual_seed(0)
    OSDNForCausalLM(OSDNConfig.from_preset("osdn-tiny", num_hidden_layers=1)).save_pretrained(folder)
    load_tokenizer("bytes").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def client(checkpoint):
    command = [sys.executable, "-m", "osdn", "serve", checkpoint, "--port", "0", "--name", "tiny"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        line = server.stdout.readline()
        address = next(word for word in line.split() if word.startswith("http"))
        with openai.OpenAI(base_url=address.rstrip(";"), api_key="none", max_retries=5) as client:
            yield client
        server.terminate()
        assert server.wait(timeout=30) in (0, -15)


@pytest.fixture(scope="module")
def text(checkpoint):
    """The model's greedy continuation."""
    tokenizer, model = load_tokenizer(str(checkpoint)), OSDNForCausalLM.from_pretrained(checkpoint)

    def continue_(prompt, count=12):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        new = model.generate(ids, max_new_tokens=count, do_sample=False)[0, ids.shape[1] :]
        return tokenizer.decode(new, skip_special_tokens=True)

    return continue_


def test_a_completion_is_the_greedy_text(client, text):
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.choices[0].text == text(PROMPT) != ""


def test_a_streamed_completion_is_the_same_text(client, text):
    pieces = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, stream=True)
    streamed = "".join(piece.choices[0].text for piece in pieces if piece.choices)
    assert streamed == text(PROMPT).rstrip("\ufffd")  # an incomplete character is not streamed


def test_messages_are_joined_if_there_is_no_chat_template(client, text):
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": PROMPT}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content == text(f"a\n{PROMPT}\n")


def test_only_the_loaded_model_is_listed_and_answers(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="other", prompt=PROMPT)
    assert "pinned to 'tiny'" in error.value.response.json()["detail"]


def test_a_name_with_both_kinds_of_addresses_is_served_by_the_older(monkeypatch):
    def both(host, port, **_):
        return [(socket.AF_INET6, 1, 6, "", ("::1", port)), (socket.AF_INET, 1, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with bind("127.0.0.1", 0) as listening:
        assert listening.family == socket.AF_INET


def test_an_address_in_use_is_reported(checkpoint):
    with bind("localhost", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["serve", str(checkpoint), "--port", port])
    assert result.exit_code == 1
    assert f"cannot listen on localhost, port {port}" in " ".join(result.stderr.split())
