"""A mirror and checkpoints shared by the tests in this folder, and no network."""

import pytest
import torch

from osdn import hub
from osdn.evaluation import data
from tests.evaluation.mirror import save_llama, save_osdn, write_mirror


@pytest.fixture(autouse=True, scope="session")
def _no_hub(tmp_path_factory):
    """Neither the hub nor the machine's own cache is available."""
    with pytest.MonkeyPatch.context() as patch:
        hub.hub_answers.cache_clear()
        patch.setattr(hub.huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setattr(data.datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield
    hub.hub_answers.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Models this small lose more to synchronisation than they gain from threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def mirror(tmp_path_factory):
    return write_mirror(tmp_path_factory.mktemp("mirror"))


@pytest.fixture(scope="session")
def osdn(tmp_path_factory):
    return save_osdn(tmp_path_factory.mktemp("checkpoints") / "osdn")


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("checkpoints") / "llama")
