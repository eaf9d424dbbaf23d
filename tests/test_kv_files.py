"""The store of KVFiles without an engine: what is damaged is a miss, what is written appears whole,
and the size holds."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
import safetensors.torch  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from sipipe.errors import ConfigError, UnsupportedError  # noqa: E402
from sipipe.kv_files import connector  # noqa: E402
from sipipe.kv_files import store as kv_files  # noqa: E402
from sipipe.kv_files.settings import MODULE, check, is_used  # noqa: E402
from sipipe.kv_files.settings import settings as read_settings  # noqa: E402
from sipipe.kv_files.store import Store  # noqa: E402

SPACE, BLOCK = "space", "abcd"
NAME = "0-2.0-1.safetensors"


def tensors(seed=0, dtype=torch.float32, layers=(0, 1)):
    generator = torch.Generator().manual_seed(seed)
    return {i: torch.randn(2, 4, 8, generator=generator).to(dtype) for i in layers}


def stored(directory, *, block=BLOCK, seed=0, **more):
    store = Store(directory, 1 << 30)
    store.write(SPACE, block, NAME, tensors(seed, **more))
    return store, store.folder(SPACE, block) / NAME


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_what_was_written_is_read(tmp_path, dtype):
    store, path = stored(tmp_path, dtype=dtype)
    read = store.read(path, f"{SPACE}/{BLOCK}", tensors(1, dtype=dtype))
    for layer, tensor in tensors(dtype=dtype).items():
        assert torch.equal(read[layer], tensor)
    assert list(path.parent.iterdir()) == [path]


def is_miss(store, path):
    try:
        store.read(path, f"{SPACE}/{BLOCK}", tensors(1))
    except (OSError, ValueError, safetensors.SafetensorError):
        return True
    return False


def foreign(directory, path):
    _, other = stored(directory / "other", block="ef01")
    shutil.copy(other, path)


def with_nan(path):
    content = safetensors.torch.load(path.read_bytes())
    content["1"][0, 0, 0] = float("nan")
    words = {f"crc {layer}": kv_files.checksum(value) for layer, value in content.items()}
    safetensors.torch.save_file(content, path, words | {"name": f"{SPACE}/{BLOCK}"})


def with_words(path, words):
    """The file with another header: ``words`` changes it."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    words(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


def of_another_type(header, dtype="F8_E8M0"):
    """Tensors of a type that torch's reader of safetensors does not know, though their parser does."""
    for layer in "01":
        header[layer] |= {"dtype": dtype, "shape": [256]}


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "gone": Path.unlink,
    "a link to nothing": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "a link": lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "huge": lambda path: os.truncate(path, 1 << 40),
    "a huge header": lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:]),
    "another block's": lambda path: foreign(path.parents[3], path),
    "not a number": with_nan,
    "another dtype": lambda path: stored(path.parents[3], dtype=torch.float16),
    "words of nothing": lambda path: with_words(
        path, lambda header: header.update(__metadata__=None)
    ),
    "a type that torch lacks": lambda path: with_words(path, of_another_type),
    "a layer less": lambda path: stored(path.parents[3], layers=(0,)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_every_kind_of_damage_is_a_miss(tmp_path, kind):
    store, path = stored(tmp_path)
    DAMAGES[kind](path)
    assert is_miss(store, path)


@settings(max_examples=200)
@given(cut=st.integers(0, 10_000), flip=st.integers(1, 255), truncates=st.booleans())
def test_every_byte_counts(tmp_path_factory, cut, flip, truncates):
    """A file that is cut off anywhere, or has another byte, is a miss or has the same tensors."""
    store, path = stored(tmp_path_factory.mktemp("store"))
    content = bytearray(path.read_bytes())
    cut %= len(content)
    if truncates:
        del content[cut:]
    else:
        content[cut] ^= flip
    path.write_bytes(content)
    try:
        read = store.read(path, f"{SPACE}/{BLOCK}", tensors(1))
    except (OSError, ValueError, safetensors.SafetensorError):
        return
    assert not truncates
    for layer, tensor in tensors().items():
        assert torch.equal(read[layer], tensor)


spans = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 1)), max_size=6)


@given(spans=spans, ranks=st.integers(1, 2))
def test_a_block_is_whole_where_its_layers_are(tmp_path_factory, spans, ranks):
    """Whatever the cuts were of the stages that stored it."""
    store = Store(tmp_path_factory.mktemp("store"), 1 << 30)
    folder = store.folder(SPACE, BLOCK)
    folder.mkdir(parents=True)
    (folder / "0-6.0-1.safetensors.x.new").touch()
    for first, end, rank in spans:
        (folder / f"{first}-{end}.{rank}-{ranks}.safetensors").touch()
    covered = {(layer, rank) for first, end, rank in spans for layer in range(first, end)}
    whole = all((layer, rank) in covered for layer in range(6) for rank in range(ranks))
    assert store.is_whole(SPACE, BLOCK, layers=6, ranks=ranks) == whole


def size_of(directory):
    """Bytes of files, some of which are removed meanwhile."""
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total


def test_the_size_holds_with_several_writers_and_what_was_used_last_stays(tmp_path):
    bound = 100_000

    def write(writer):
        store = Store(tmp_path, bound)
        for number in range(100):
            store.write(SPACE, f"{writer}{number:03}", NAME, tensors())
            assert size_of(tmp_path) <= bound

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, "abcd"))
    assert size_of(tmp_path) > bound / 2
    store = Store(tmp_path, bound)
    for number in range(200):
        store.write(SPACE, f"e{number:03}", NAME, tensors())
        used = store.folder(SPACE, "e000") / NAME
        os.utime(used, (2**31, 2**31))  # each time it was read last
    store.read(used, f"{SPACE}/e000", tensors(1))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_where_the_disk_is_full_what_was_used_last_is_kept(tmp_path, monkeypatch, code):
    room = 100_000
    write_bytes = Path.write_bytes

    def write(path, content):
        if size_of(tmp_path) + len(content) > room:
            path.touch()  # as a disk does it: the name has its place
            raise OSError(code, os.strerror(code))
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", write)
    store = Store(tmp_path, 1 << 30)
    for number in range(500):
        store.write(SPACE, f"a{number:03}", NAME, tensors())
    kept = {path.parent.name for path in tmp_path.rglob(NAME)}
    assert room / 2 < size_of(tmp_path) <= room
    # What comes first on a full disk is not stored: it makes the room for the next ones.
    missed = {f"a{number:03}" for number in range(450, 500)} - kept
    assert len(missed) <= 3, missed
    assert not list(tmp_path.rglob("*.new"))


def test_a_writer_stores_little_while_another_one_removes_files(tmp_path):
    bound = 100_000
    store = Store(tmp_path, bound)
    store.write(SPACE, "before", NAME, tensors())
    before = size_of(tmp_path)
    with open(tmp_path / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for number in range(100):
            store.write(SPACE, f"amid{number:03}", NAME, tensors())
        assert before < size_of(tmp_path) <= bound / 16 + before
    store.write(SPACE, "behind", NAME, tensors())
    assert (store.folder(SPACE, "behind") / NAME).exists()


def test_what_a_writer_left_that_ended_amid_a_file_is_removed(tmp_path):
    store, path = stored(tmp_path)
    old, new = (path.with_name(f"{NAME}.{kind}{kv_files.NEW}") for kind in ("old", "new"))
    for left in (old, new):
        left.write_bytes(b"half")
    then = time.time() - 2 * kv_files.LEFT_OVER
    os.utime(old, (then, then))
    store.evict()
    assert sorted(path.parent.iterdir()) == sorted([path, new])


def test_only_what_a_store_has_written_is_removed(tmp_path):
    """Whoever names a directory with a model in it keeps the model."""
    others = [
        tmp_path / "model.safetensors",
        tmp_path / "models" / "model-00001-of-00002.safetensors",
        tmp_path / "models" / "ab" / "abc" / "adapter.safetensors",
        tmp_path / "models" / "ab" / "model" / NAME,
        tmp_path / "models" / "old.new",
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(90_000))
        os.utime(path, (1, 1))
    elsewhere = tmp_path / "elsewhere"
    stored(elsewhere)
    (tmp_path / "link").symlink_to(elsewhere / SPACE)
    store = Store(tmp_path, 100_000)
    for number in range(100):
        store.write(SPACE, f"a{number:03}", NAME, tensors())
    assert all(path.stat().st_size == 90_000 for path in others)
    assert list(Store(elsewhere, 1).files(SPACE, BLOCK))
    assert size_of(tmp_path / SPACE) < 100_000


KILLED = """
import sys, torch
from pathlib import Path
from sipipe.kv_files.store import Store
store = Store(Path(sys.argv[1]), 1 << 30)
block = {i: torch.full((256, 64), float(i)) for i in range(4)}
print(flush=True)
for number in range(10**6):
    store.write("space", f"{number:06}", "0-4.0-1.safetensors", block)
"""


@pytest.mark.ci
def test_a_writer_that_is_killed_leaves_whole_files_alone(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        writer.stdout.readline()
        while len(list(tmp_path.rglob("*.safetensors"))) < 20:
            pass
        writer.kill()
    store = Store(tmp_path, 1 << 30)
    block = {i: torch.full((256, 64), float(i)) for i in range(4)}
    files = list(tmp_path.rglob("*.safetensors"))
    for path in files:
        read = store.read(path, f"space/{path.parent.name}", block)
        assert all(torch.equal(read[i], block[i]) for i in block)


def test_a_directory_that_takes_nothing_costs_no_request(tmp_path):
    (tmp_path / "file").touch()
    store = Store(tmp_path / "file", 1 << 30)
    assert store.namespace({"a": 1})
    store.write(SPACE, BLOCK, NAME, tensors())
    assert not store.is_whole(SPACE, BLOCK, layers=2, ranks=1)


def test_blocks_with_values_that_are_none_are_not_stored(tmp_path):
    block = tensors()
    block[1][0, 0, 0] = float("nan")
    store = Store(tmp_path, 1 << 30)
    store.write(SPACE, BLOCK, NAME, block)
    assert not list(store.files(SPACE, BLOCK))


def test_another_model_is_another_folder(tmp_path):
    """Whichever byte is another one: of a training of one layer's weights, most pieces are equal."""
    content = bytes(100_000)
    digests = set()
    for place in (None, *range(0, len(content), 9_001)):
        folder = tmp_path / str(place)
        folder.mkdir()
        changed = bytearray(content)
        if place is not None:
            changed[place] = 1
        (folder / "model.safetensors").write_bytes(changed)
        digests.add(connector.digest_of_weights(str(folder)))
    assert len(digests) == 13
    store = Store(tmp_path / "store", 1)
    assert len({store.namespace({"model": digest}) for digest in digests}) == 13


def test_a_model_of_one_file_or_with_code_of_its_own_is_known_by_what_is_in_it(tmp_path):
    file = tmp_path / "model.gguf"
    digests = []
    for content in (b"1", b"2"):
        file.write_bytes(content)
        digests.append(connector.digest_of_weights(str(file)))
        digests.append(connector.digest_of_weights(str(tmp_path)))
    (tmp_path / "modeling.py").touch()
    digests.append(connector.digest_of_weights(str(tmp_path)))
    assert len(set(digests)) == 5
    assert connector.digest_of_weights("a-name/on-the-hub") == ""


class Config:
    """A model's configuration as transformers has it."""

    _commit_hash = None

    def to_json_string(self):
        return "{}"


def configured(load_format="auto", **changes):
    """The configuration of a server whose model's configuration has these values."""
    model = SimpleNamespace(
        model="a-name/on-the-hub",
        hf_config=Config(),
        revision=None,
        model_impl="auto",
        max_model_len=4096,
        disable_sliding_window=False,
        quantization=None,
        dtype=torch.float32,
    )
    vars(model).update(changes)
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(
            cache_dtype="auto", block_size=32, prefix_caching_hash_algo="sha256"
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, decode_context_parallel_size=1),
        device_config=SimpleNamespace(device_type="cpu"),
        load_config=SimpleNamespace(load_format=load_format),
    )


def namespace_of(load_format="auto", **changes):
    """What is compared of a server whose model's configuration has these values."""
    caches = SimpleNamespace(kv_cache_layout="LBHNC")
    return connector.manifest(configured(load_format, **changes), caches)


def attention(kind, **more):
    """A layer's cache, as vLLM describes it."""
    return kind(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.float32, **more)


FULL = attention(FullAttentionSpec)


class Server:
    """The scheduler's side of a server of a model with one layer, whose worker's side stores at once."""

    def __init__(self, directory, spec=FULL):
        groups = [SimpleNamespace(kv_cache_spec=spec)]
        config = configured(get_total_num_hidden_layers=lambda: 1)
        config.kv_transfer_config = SimpleNamespace(
            kv_connector_extra_config={"directory": str(directory)},
            is_kv_consumer=True,
            is_kv_producer=True,
        )
        caches = SimpleNamespace(
            kv_cache_groups=groups, hash_block_size=None, kv_cache_layout="LBHNC"
        )
        self.files = connector.KVFiles(config, KVConnectorRole.SCHEDULER, caches)
        self.files.bind_kv_cache_manager(SimpleNamespace(get_block_ids=lambda _: ([1, 2, 3],)))

    def found(self, request):
        """Tokens of a request that are stored."""
        return self.files.get_num_new_matched_tokens(request, 0)[0]

    def begin(self, request):
        self.files.update_state_after_alloc(request, None, 0)

    def compute(self, request, computed, tokens):
        """Compute so many tokens behind those that are ``computed``; returns the blocks stored."""
        output = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request.request_id], num_computed_tokens=[computed]
            ),
            num_scheduled_tokens={request.request_id: tokens},
        )
        moves = self.files.build_connector_meta(output)
        layers = {0: torch.zeros(2, 4)}
        for block_hash, _ in moves.stores:
            self.files._store.write(moves.namespace, block_hash, "0-1.0-1.safetensors", layers)  # noqa: SLF001
        return len(moves.stores)


def a_request(name="a"):
    return SimpleNamespace(
        request_id=name,
        num_tokens=97,
        num_prompt_tokens=97,
        lora_request=None,
        block_hashes=[bytes([number]) * 4 for number in range(3)],
    )


def test_what_other_weights_have_computed_is_never_found(tmp_path):
    """Neither by a server whose weights have changed, nor by one that has the checkpoint's."""
    server, other = Server(tmp_path), Server(tmp_path)
    request = a_request()
    server.begin(request)
    assert server.compute(request, 0, 64) == 2
    assert server.found(request) == other.found(request) == 64
    assert server.files.reset_cache()
    assert server.found(request) == 0
    assert other.found(request) == 64
    assert server.compute(request, 64, 33) == 0, "its first blocks are the old weights'"
    server.begin(request)  # anew, after a preemption
    assert server.compute(request, 0, 97) == 3
    assert server.found(request) == 96
    assert other.found(request) == 64
    assert server.files.reset_cache()
    assert server.found(request) == 0
    assert Server(tmp_path).found(request) == 64


WINDOW = attention(SlidingWindowSpec, sliding_window=64)


@pytest.mark.parametrize(
    "spec",
    [
        WINDOW,
        attention(ChunkedLocalAttentionSpec, attention_chunk_size=64),
        UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": FULL, "b": WINDOW}),
    ],
)
def test_attention_with_a_window_is_refused(tmp_path, spec):
    """Before the window vLLM has the null block: its content would be stored under a prompt's hash."""
    with pytest.raises(UnsupportedError, match=r"has a window: .*--disable-sliding-window"):
        Server(tmp_path, spec)
    promoted = attention(FullAttentionSpec, sliding_window=64)  # as beside layers without one
    Server(tmp_path, promoted)


def test_processors_that_lay_keys_out_in_another_way_share_nothing(monkeypatch):
    """AMX is no part of what torch calls the processor's capability."""
    found = []
    for amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        found.append(json.dumps(namespace_of()))
    assert found[0] != found[1]


def test_a_server_whose_weights_change_often_leaves_no_folders(tmp_path):
    store = Store(tmp_path, 100_000)
    spaces = [store.namespace({"weights": number}) for number in range(30)]
    for number, space in enumerate(spaces):
        store.describe({"weights": number})
        for block in range(10):
            store.write(space, f"{block:02}ab", NAME, tensors())
    then = time.time() - 2 * kv_files.LEFT_OVER
    for path in tmp_path.glob("*/manifest.json"):
        os.utime(path, (then, then))
    store.evict()
    used = {path.parents[2].name for path in tmp_path.rglob(NAME)}
    assert len(used) < 30
    assert {path.name for path in tmp_path.iterdir()} == used | {".lock"}
    assert spaces[-1] in used
    store.describe({"weights": 0})
    assert (tmp_path / spaces[0] / "manifest.json").exists()


def a_worker(tmp_path, monkeypatch):
    """A worker's side of a model with two layers, and the file of a block that it has stored."""
    files = worker_of(8)
    files._store = Store(tmp_path, 1 << 30)  # noqa: SLF001
    files._layers = 2  # noqa: SLF001
    monkeypatch.setattr(connector, "get_tensor_model_parallel_rank", lambda: 0)
    caches = {f"model.layers.{layer}.self_attn.attn": torch.ones(8, 4) for layer in (0, 1)}
    files.register_kv_caches(caches)
    tensors_of = {layer: cache[3] for layer, cache in files._caches.items()}  # noqa: SLF001
    files._store.write(SPACE, BLOCK, NAME, tensors_of)  # noqa: SLF001
    return files, files._store.folder(SPACE, BLOCK) / NAME  # noqa: SLF001


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.EACCES, None])
def test_a_reader_that_is_short_of_something_removes_no_whole_file(tmp_path, monkeypatch, code):
    files, path = a_worker(tmp_path, monkeypatch)
    assert files._load(SPACE, BLOCK, 5)  # noqa: SLF001

    def refuse(*_):
        raise MemoryError if code is None else OSError(code, os.strerror(code))

    monkeypatch.setattr(files._store, "read", refuse)  # noqa: SLF001
    assert not files._load(SPACE, BLOCK, 5)  # noqa: SLF001
    assert path.exists() == (code != errno.EACCES)


def test_a_file_of_more_layers_than_the_model_has_is_not_read(tmp_path, monkeypatch):
    """Its name would allow it any size."""
    files, path = a_worker(tmp_path, monkeypatch)
    path.rename(path.with_name("0-99999.0-1.safetensors"))
    monkeypatch.setattr(files._store, "read", None)  # noqa: SLF001
    assert not files._load(SPACE, BLOCK, 5)  # noqa: SLF001


def test_what_decides_the_keys_of_a_cache_is_compared():
    """Phi 3's rotary embeddings depend on the longest request; a branch is another commit one day."""
    changed = [
        {"max_model_len": 131_072},
        {"disable_sliding_window": True},
        {"model_impl": "transformers"},
        {"dtype": torch.float16},
        {"quantization": "awq"},
        {"revision": "main"},
        {"load_format": "dummy"},
    ]
    assert len({json.dumps(namespace_of(**change)) for change in ({}, *changed)}) == 8
    commits = []
    for commit in ("abc", "def"):
        config = Config()
        config._commit_hash = commit  # noqa: SLF001
        commits.append(namespace_of(hf_config=config, revision="main"))
    assert commits[0] != commits[1]


def worker_of(blocks):
    """A worker's side, whose scheduler has so many blocks."""
    files = connector.KVFiles.__new__(connector.KVFiles)
    files._blocks = blocks  # noqa: SLF001
    files._ranks = 1  # noqa: SLF001
    return files


ATTENTION = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    "caches",
    [
        # An index of tokens beside the keys, as DeepSeek's sparse attention has it.
        {f"{ATTENTION}.attn": torch.zeros(8, 4), f"{ATTENTION}.indexer.k_cache": torch.zeros(8, 2)},
        {f"{ATTENTION}.0.attn": torch.zeros(8, 4), f"{ATTENTION}.1.attn": torch.zeros(8, 4)},
        {f"{ATTENTION}.attn": torch.zeros(2, 9, 4)},  # keys and values apart
        {f"{ATTENTION}.attn": [torch.zeros(8, 4), torch.zeros(8, 2)]},  # a recurrent layer's states
    ],
)
def test_caches_of_another_form_are_refused(caches):
    """A block would be stored in part, and taken for whole."""
    with pytest.raises(UnsupportedError, match="--kv-transfer-config"):
        worker_of(8).register_kv_caches(caches)


def test_a_block_has_all_of_its_kernels_blocks(monkeypatch):
    """A kernel's blocks may be smaller than the scheduler's."""
    monkeypatch.setattr(connector, "get_tensor_model_parallel_rank", lambda: 0)
    files = worker_of(8)
    files.register_kv_caches({f"{ATTENTION}.attn": torch.arange(32).reshape(16, 2)})
    assert files._caches[0][3].flatten().tolist() == [12, 13, 14, 15]  # noqa: SLF001


def transfer(module, extra):
    """What the settings need of vLLM's ``KVTransferConfig``."""
    return SimpleNamespace(kv_connector_module_path=module, kv_connector_extra_config=extra)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({}, "directory"),
        ({"directory": "caches"}, "directory"),
        ({"directory": 5}, "directory"),
        ({"directory": "/a\0b"}, "directory.* no text"),
        ({"directory": "/a\ud800"}, "directory.* no text"),
        ({"directory": "/a", "size_gib": 0}, "size_gib"),
        ({"directory": "/a", "size_gib": "5"}, "size_gib"),
        ({"directory": "/a", "size_gib": True}, "size_gib"),
        ({"directory": "/a", "size_gib": float("nan")}, "size_gib"),
        ({"directory": "/a", "shared_storage_path": "/a"}, "shared_storage_path"),
    ],
)
def test_settings_are_refused_by_name(extra, named):
    with pytest.raises(ConfigError, match=named):
        read_settings(extra)
    ours = {"kv_connector_module_path": MODULE, "kv_connector_extra_config": extra}
    with pytest.raises(ConfigError, match=named):
        check(transfer(MODULE, extra))
    theirs = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"any": 1}}
    with pytest.raises(ConfigError, match=named):  # joined with another one by MultiConnector
        check(transfer(None, {"connectors": [theirs, ours]}))


@pytest.mark.parametrize("extra", [{}, None, [1], {"connectors": 5}, {"connectors": [5, {}]}])
def test_settings_of_other_connectors_are_theirs(extra):
    check(transfer("a.module", extra))


@pytest.mark.parametrize(
    ("module", "extra", "used"),
    [
        (MODULE, {}, True),
        (None, {}, False),
        (None, {"connectors": [{}, {"kv_connector_module_path": MODULE}]}, True),
        (None, {"connectors": [{"kv_connector_module_path": "mine"}, "wrong"]}, False),
        (None, {"connectors": "wrong"}, False),
    ],
)
def test_its_use_is_seen_alone_and_among_others(module, extra, used):
    assert is_used(transfer(module, extra)) == used
    assert not is_used(None)
