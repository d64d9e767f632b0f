"""`osdn serve`."""

from typing import Annotated

import typer
from rich.markup import escape

from osdn.extras import require
from osdn.terminal import Checkpoint, Device, Dtype, Name, Quantize, console, messages, plain_errors


def serve(
    checkpoint: Checkpoint,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "localhost",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port to listen on; 0 picks a free one.")
    ] = 8000,
    name: Name = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    quantize: Quantize = None,
) -> None:
    """Serve a model with an OpenAI-compatible API."""
    require("osdn serve", "serve", "transformers", "fastapi", "uvicorn", "openai")
    with plain_errors():
        from osdn.models.checkpoints import load_model, load_tokenizer
        from osdn.models.identity import identify
        from osdn.serving import application, bind, run

        listening = bind(host, port)
        with messages.status(f"loading {escape(checkpoint)}"):
            tokenizer, model = load_tokenizer(checkpoint), load_model(checkpoint, device, dtype, quantize)
        identity = identify(model, checkpoint, name)
        chat = "" if tokenizer.chat_template else "; without a chat template, messages are joined as they are"
        console.print(
            f"{identity.model} answers at http://{host}:{listening.getsockname()[1]}/v1{chat}", soft_wrap=True
        )
        run(application(identity.model, model, tokenizer), listening)
