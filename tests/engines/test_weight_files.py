"""New weights in files: whole, changed elements, or adapters, written by all trainers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from safetensors.torch import load_file

from tasks.common.files import ArtifactError
from tasks.engines.server.engine import ServerEngine
from tasks.engines.weights import changes
from tasks.engines.weights.files import FileTransfer
from tasks.models.policy import Policy
from tasks.models.weights import NamedWeights
from tests.engines.conftest import FLEET, REQUEST, Fleet, does, expected, scaled
from tests.policies import adapted
from tests.stages import run_together


def transfer(root: Path, *, only_changes: bool = True, piece_bytes: int = 300) -> FileTransfer:
    found = FileTransfer(root / "w", root, torch.float32, only_changes=only_changes)
    found.piece_bytes = piece_bytes
    return found


def received(files: FileTransfer) -> dict[str, torch.Tensor]:
    return {k: v for piece in files.pieces.values() for k, v in changes.read(*piece)}


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(changes.bits(first.contiguous()), changes.bits(second.contiguous()))


def test_weights_are_written_in_pieces_and_read_once(tmp_path: Path) -> None:
    names: list[str] = []

    class Counted(dict[str, torch.Tensor]):
        def items(self) -> Any:
            for name in self:
                names.append(name)
                yield name, self[name]

    shared = torch.randn(8, 8)
    weights = Counted(a=shared, b=torch.randn(100), c=torch.randn(3, 3).t(), tied=shared)
    files = transfer(tmp_path, only_changes=False)
    files.take(weights, "1")
    assert names == list(weights)
    assert len(files.pieces) > 2
    assert all(torch.equal(tensor, weights[name]) for name, tensor in received(files).items())
    assert received(files).keys() == weights.keys()
    files.piece_bytes = 2**20
    files.take(weights, "2")
    assert [*files.pieces.values()] == [(str(tmp_path / "w" / "2-0.safetensors"), ())]
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["2-0.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changed_elements_are_bit_identical_after_many_updates(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    files = transfer(tmp_path, piece_bytes=3_000)
    files.dtype = dtype
    weights = {"a": torch.randn(40, 30), "b": torch.zeros(200), "steps": torch.tensor(7)}
    num_whole = 0
    for version in range(150):
        for tensor in (weights["a"], weights["b"]):
            places = torch.randint(tensor.numel(), (version % 12,))
            tensor.view(-1)[places] = torch.randn(len(places))
        weights["b"][version % 200] = (math.nan, -0.0, 0.0, math.inf)[version % 4]
        weights["steps"] += 1
        files.take(weights, str(version))
        num_whole += sum(not piece.changes for piece in files.pieces.values())
        found = received(files)
        assert all(same_bits(found[name], weights[name].to(found[name].dtype)) for name in weights)
        for piece in files.pieces.values():
            assert sum(map(num_bytes, piece.changes)) <= num_bytes(piece.path) / 2
    assert 2 < num_whole < 150 * len(files.pieces) / 3
    used = {path for piece in files.pieces.values() for path in (piece.path, *piece.changes)}
    assert {str(path) for path in (tmp_path / "w").iterdir()} == used


def num_bytes(path: str) -> int:
    return sum(tensor.nbytes for tensor in load_file(path).values())


def test_few_changes_take_few_bytes() -> None:
    """Compare with a number of SparseRL-Sync (arXiv 2605.07330)."""
    old = torch.zeros(1000, 1000, dtype=torch.bfloat16)
    new = old.clone()
    new.view(-1)[:10_000] = 1.0
    changed = changes.difference(iter([("w", old)]), {"w": new}, math.inf)
    assert changed is not None
    sent = sum(tensor.nbytes for tensor in changed.values())
    assert old.nbytes / sent == pytest.approx(33.3, abs=0.05)


def test_missing_change_is_an_error(tmp_path: Path) -> None:
    files = transfer(tmp_path, piece_bytes=2**20)
    weights = {"a": torch.zeros(1000)}
    for version in range(4):
        weights["a"][version] = 1.0
        files.take(weights, str(version))
    path, (first, second, third) = files.pieces[0]
    with pytest.raises(ArtifactError, match="the weight a has another checksum than at the"):
        dict(changes.read(path, [first, third]))
    Path(second).unlink()
    with pytest.raises(FileNotFoundError, match="1|2"):
        dict(changes.read(path, [first, second, third]))
    weights["a"][4] = 1.0
    files.take(weights, "4")
    assert files.pieces[0] == (str(tmp_path / "w" / "4-0.safetensors"), ())


def test_only_adapters_are_written(policy: Policy, tmp_path: Path) -> None:
    files = FileTransfer(tmp_path / "w", policy.folder, torch.float32)
    weights = NamedWeights(adapted(policy.folder, ["q_proj"]))
    for version in ("1", "2"):
        files.take(weights, version)
    path, head = sorted((tmp_path / "w").iterdir())
    assert load_file(head).keys() == {"lm_head.weight"}
    num_adapted = sum(low.numel() + high.numel() for low, high, _ in weights.adapters.values())
    assert num_bytes(str(path)) == 4 * num_adapted + 8 * len(weights.adapters)
    found = received(files)
    assert weights.keys() == found.keys()
    assert all(same_bits(found[name], weights[name]) for name in found)


def test_policy_with_other_names_is_written_whole(policy: Policy, tmp_path: Path) -> None:
    weights = NamedWeights(adapted(policy.folder, ["q_proj"]))
    weights.parts["another"] = torch.zeros(3)
    files = FileTransfer(tmp_path / "w", policy.folder, torch.float32)
    files.take(weights, "1")
    assert received(files).keys() == weights.keys()


def take_together(rank: int, meeting: str, root: Path) -> None:
    """Write the pieces of one of two trainers, and then the changed ones."""
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    files = transfer(root, piece_bytes=1_000)
    weights = {name: torch.full((100,), float(i)) for i, name in enumerate("abcdefg")}
    weights["d"] = torch.ones(2, 250)
    for version in ("1", "2", "3"):
        weights["d"][0, 0] += 1
        weights["a"][int(version)] += 1
        files.take(weights, version)
        found = received(files)
        assert all(same_bits(found[name], weights[name]) for name in weights)
        distributed.barrier()
    own = {number: len(piece.changes) for number, piece in files.pieces.items()}
    assert own == {0: 2, 1: 0, 2: 2, 3: 0, 4: 0}
    distributed.destroy_process_group()


def test_trainers_write_pieces_side_by_side(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/meeting"
    run_together(take_together, [(rank, meeting, tmp_path) for rank in range(2)])


def test_restarted_server_gets_every_change(fleet: Fleet, policy: Policy) -> None:
    servers = fleet(True, True)
    engine = ServerEngine(FLEET, policy, servers, servers.serving())
    assert isinstance(engine.transfer, FileTransfer)
    engine.transfer.only_changes = True
    model = scaled(policy, 1.5)
    engine.set_weights(NamedWeights(model))
    with torch.no_grad():  # a change of one weight, and back
        weight = model.get_parameter("model.layers.0.mlp.down_proj.weight")
        weight.mul_(2.0)
        engine.set_weights(NamedWeights(model))
        weight.mul_(0.5)
        servers.drop(engine.endpoints[0])
        engine.set_weights(NamedWeights(model))
    assert sum(len(piece.changes) for piece in engine.transfer.pieces.values()) == 2
    assert len(engine.transfer.pieces) == 1
    assert [does(servers, place).version for place in (0, 1)] == ["3", "3"]
    assert engine.generate(REQUEST).token_ids == expected(policy, 1.5)
