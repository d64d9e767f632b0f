"""Serves one checkpoint with the server of `transformers`, which speaks OpenAI's protocol."""

import logging
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import GenerationState

# For models that were not trained to chat: the messages, one after the other.
PLAIN_CHAT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


class LoadedModel(ModelManager):
    """A manager with a single model, which is already loaded and stays loaded."""

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(device=str(model.device))
        self.force_model, self.model, self.tokenizer = name, model, tokenizer
        if tokenizer.chat_template is None:
            tokenizer.chat_template = PLAIN_CHAT

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self.model, self.tokenizer

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "owned_by": "", "created": 0}]


def application(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> FastAPI:
    """The web application that serves a model."""
    manager, state = LoadedModel(name, model, tokenizer), GenerationState()
    return build_server(
        manager,
        ChatCompletionHandler(manager, state),
        completion_handler=CompletionHandler(manager, state),
        response_handler=ResponseHandler(manager, state),
        transcription_handler=TranscriptionHandler(manager, state),
        systemone_handler=SystemOneHandler(manager, state),
        generation_state=state,
    )


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, by IPv4 if the host has both; port 0 picks a free port."""
    try:
        families = [found[0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        family = socket.AF_INET if socket.AF_INET in families else families[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        raise OSError(
            f"cannot listen on {host}, port {port} ({error.strerror}): choose another port or host"
        ) from error
    return listening


def run(app: FastAPI, listening: socket.socket) -> None:
    """Serve until the process is interrupted."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
