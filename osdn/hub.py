"""The Hugging Face hub; if it cannot be reached, nothing waits for it."""

import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest.mock import patch

import huggingface_hub.constants

TIMEOUT = 5  # seconds


@cache
def hub_answers() -> bool:
    """Whether the hub can be reached.  Asked once: without this, every file would retry for half a minute."""
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(huggingface_hub.constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=TIMEOUT).close()
    except urllib.error.HTTPError:
        return True  # an error page is an answer too
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def no_waiting() -> Iterator[None]:
    """If the hub does not answer, look for its models and data in the local caches only."""
    places = [huggingface_hub.constants]
    if "datasets" in sys.modules:
        places.append(sys.modules["datasets"].config)
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(patch.object(place, "HF_HUB_OFFLINE", not hub_answers()))
        yield
