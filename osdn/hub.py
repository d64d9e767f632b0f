"""The Hugging Face hub, where it can be reached; where not, nothing waits for it."""

import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest.mock import patch

import huggingface_hub.constants

PATIENCE = 5  # seconds to wait for an answer


@cache
def hub_answers() -> bool:
    """Whether the hub can be reached; asked once, as each file would ask for half a minute."""
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(huggingface_hub.constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=PATIENCE).close()
    except urllib.error.HTTPError:
        return True  # an answer, if not the page
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def no_waiting() -> Iterator[None]:
    """Models and data of the hub are looked for in its caches alone where it does not answer."""
    places = [huggingface_hub.constants]
    if "datasets" in sys.modules:
        places.append(sys.modules["datasets"].config)
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(patch.object(place, "HF_HUB_OFFLINE", not hub_answers()))
        yield
