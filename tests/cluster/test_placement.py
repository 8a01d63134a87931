"""Every rank and engine gets its place; what does not fit is one sentence that names the key."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fleet.cluster.inventory import Device, Host, Inventory
from megatron_fleet.cluster.placement import EnginePlace, PlacementRequest, RankPlace, place
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load

TRANSPORTS = ("shm", "gloo", "cuda_ipc", "nccl", "disk")


def gpus(*numbers: int) -> tuple[Device, ...]:
    return tuple(Device(i, f"GPU-{i:04d}", "H100", 80 << 30) for i in numbers)


def inventory(*counts: int, **ranks: tuple[int, ...]) -> Inventory:
    """Hosts a, b, … with so many GPUs each, and the ranks that were started on them."""
    names = "abcdefgh"[: len(counts)]
    return Inventory(
        tuple(
            Host(name, f"10.0.0.{i}", gpus(*range(count)), ranks.get(name, () if ranks else None))
            for i, (name, count) in enumerate(zip(names, counts, strict=True))
        )
    )


def ranks_at(*places: tuple[str, int | None]) -> tuple[RankPlace, ...]:
    return tuple(RankPlace(i, host, device) for i, (host, device) in enumerate(places))


def engines_at(*places: tuple[str, tuple[int, ...]]) -> tuple[EnginePlace, ...]:
    return tuple(EnginePlace(host, devices) for host, devices in places)


def test_one_host_without_devices():
    placed = place(inventory(0), PlacementRequest(2, engines=2, tensor_parallel=2))
    assert placed.ranks == ranks_at(("a", None), ("a", None))
    assert placed.engines == engines_at(("a", ()), ("a", ()))
    assert (placed.colocated, placed.transport) == (False, "shm")
    assert place(inventory(0), PlacementRequest(2, colocated=True)).colocated


def test_several_hosts_without_devices():
    placed = place(inventory(0, 0), PlacementRequest(3, engines=3))
    assert placed.ranks == ranks_at(("a", None), ("b", None), ("b", None))
    assert [engine.host for engine in placed.engines] == ["a", "b", "a"]
    assert placed.transport == "gloo"
    # Colocated engines stay with the ranks; the controller's own host is where the shared memory is.
    placed = place(inventory(0, 0, b=(0, 1)), PlacementRequest(2, engines=2, colocated=True))
    assert {engine.host for engine in placed.engines} == {"b"}
    assert placed.transport == "gloo"
    assert place(inventory(0, 0, a=(0, 1)), PlacementRequest(2, engines=2, colocated=True)).transport == "shm"


def test_colocated_is_the_default_on_devices_and_engines_sit_on_consecutive_ranks():
    placed = place(inventory(4, 4), PlacementRequest(8, engines=3, tensor_parallel=2))
    assert placed.ranks == ranks_at(*[("a", i) for i in range(4)], *[("b", i) for i in range(4)])
    assert placed.engines == engines_at(("a", (0, 1)), ("b", (0, 1)), ("a", (2, 3)))
    assert (placed.colocated, placed.transport) == (True, "cuda_ipc")


def test_engines_with_devices_of_their_own():
    placed = place(inventory(4, 2), PlacementRequest(3, engines=2, colocated=False))
    assert placed.ranks == ranks_at(("a", 0), ("a", 1), ("a", 2))
    assert placed.engines == engines_at(("a", (3,)), ("b", (0,)))
    assert (placed.colocated, placed.transport) == (False, "nccl")
    # Two devices of one host: not the one that is left on the first.
    assert place(inventory(4, 2), PlacementRequest(3, 1, 2, colocated=False)).engines == engines_at(("b", (0, 1)))


def test_ranks_stay_where_they_were_started():
    # As srun with --distribution=cyclic starts them, on hosts of different sizes; the first host is the controller's.
    placed = place(inventory(0, 4, 2, b=(0, 2, 4), c=(1, 3)), PlacementRequest(5, engines=2, tensor_parallel=2))
    assert placed.ranks == ranks_at(("b", 0), ("c", 0), ("b", 1), ("c", 1), ("b", 2))
    assert placed.engines == engines_at(("b", (0, 1)), ("c", (0, 1)))


def test_devices_go_by_their_index_not_their_position():
    hosts = Inventory((Host("a", devices=gpus(5, 3, 6)),))
    placed = place(hosts, PlacementRequest(2, engines=1, colocated=False))
    assert placed.ranks == ranks_at(("a", 5), ("a", 3))
    assert placed.engines == engines_at(("a", (6,)))
    assert hosts.visible_devices("a", (6, 5)) == "GPU-0006,GPU-0005"


def test_auto_takes_what_the_hosts_have():
    everything = PlacementRequest(2, engines=None, tensor_parallel=2)
    assert place(inventory(4, 4), replace(everything, colocated=True)).engines == engines_at(("a", (0, 1)))
    apart = replace(everything, colocated=False)
    placed = place(inventory(4, 5), apart)
    assert placed.engines == engines_at(("a", (2, 3)), ("b", (0, 1)), ("b", (2, 3)))
    assert place(inventory(2), apart).engines == ()  # hosts with engines only may join
    assert place(inventory(0, 0), apart).engines == engines_at(("a", ()), ("b", ()))
    with pytest.raises(UserError, match="1 × 2 GPUs do not fit into the 1 that the ranks have"):
        place(inventory(1), replace(everything, ranks=1, colocated=True))
    # Without others it would be shm, which reaches no engine on another host.
    assert place(inventory(0), apart).transport == "gloo"
    config = load(["experiment=quickstart", "rollout.engine.replicas=auto"])
    assert PlacementRequest.of(1, config.rollout.engine, 0).engines is None
    assert place(inventory(2), PlacementRequest.of_evaluation(config.rollout.engine)).engines == engines_at(
        ("a", (0,)), ("a", (1,))
    )


def test_engines_without_a_trainer():
    config = load(["experiment=quickstart", "rollout.engine.replicas=3"])
    placed = place(inventory(2, 1), PlacementRequest.of_evaluation(config.rollout.engine))
    assert (placed.ranks, placed.colocated) == ((), False)
    assert placed.engines == engines_at(("a", (0,)), ("b", (0,)), ("a", (1,)))
    with pytest.raises(UserError, match=r"3 × 1 GPUs do not fit into the 2 that there are \(2 on a\)"):
        place(inventory(2), PlacementRequest.of_evaluation(config.rollout.engine))


def test_the_keys_are_those_of_the_configuration():
    keys = ["parallel.tensor=2", "parallel.data=3", "rollout.engine.replicas=4", "rollout.engine.tensor_parallel=5"]
    config = load(["experiment=quickstart", *keys, "rollout.engine.colocated=true", "rollout.engine.transport=disk"])
    assert PlacementRequest.of(config.ranks, config.rollout.engine, config.eval.engines) == PlacementRequest(
        6, 4, 5, True, "disk"
    )


@pytest.mark.parametrize(("transport", "placed"), [("auto", "message"), ("own:transport", "own:transport")])
def test_a_trainer_of_the_users_own_has_no_ranks_here(transport, placed):
    keys = ["policy.trainer=my:Trainer", "rollout.sampler=my:Sampler", f"rollout.engine.transport={transport}"]
    config = load(["experiment=quickstart", "parallel.data=2", *keys])
    assert config.ranks == 0
    found = place(inventory(0), PlacementRequest.of(config.ranks, config.rollout.engine, config.eval.engines))
    assert (found.ranks, found.colocated, found.transport) == ((), False, placed)


@pytest.mark.parametrize(
    ("hosts", "wanted", "words"),
    [
        (inventory(4, 4), PlacementRequest(9), ["context × data = 9 ranks", "there are 8 (4 on a, 4 on b)"]),
        (
            inventory(4, 4, a=(0, 1, 2)),
            PlacementRequest(4),
            ["4 ranks are needed", "3 were started (a: 0, 1, 2; b: none)"],
        ),
        (inventory(0, a=(0, 1, 1)), PlacementRequest(3), ["3 ranks are needed", "(a: 0, 1, 1)"]),
        (inventory(0, a=(0, 2)), PlacementRequest(2), ["(a: 0, 2)"]),
        (inventory(2, 4, a=(0, 1, 2)), PlacementRequest(3), ["3 ranks were started on host a, which has 2 GPUs"]),
        (inventory(0, 2, a=(0,)), PlacementRequest(1), ["1 ranks were started on host a, which has 0 GPUs"]),
        (
            inventory(4, 4),
            PlacementRequest(6, 7),
            ["replicas × tensor_parallel = 7 × 1", "6 that the ranks have", "colocated=auto (4 on a, 2 on b)"],
        ),
        (inventory(4, 4), PlacementRequest(8, 1, 8), ["1 × 8", "several hosts", "rollout.engine.tensor_parallel"]),
        (
            inventory(4, 4),
            PlacementRequest(8, 1, colocated=False),
            ["0 that the ranks leave free", "rollout.engine.colocated=false"],
        ),
        (inventory(3, 3), PlacementRequest(2, 3, 2, colocated=False), ["3 × 2 GPUs", "4 that the ranks leave free"]),
        (
            inventory(0),
            PlacementRequest(1, transport="cuda_ipc"),
            ["transport=cuda_ipc", "CPUs of 1 host", "auto or disk"],
        ),
        (inventory(0), PlacementRequest(1, transport="nccl"), ["transport=nccl", "CPUs of 1 host"]),
        (
            inventory(0, 0),
            PlacementRequest(2, transport="shm"),
            ["transport=shm works with CPUs of one host", "2 hosts"],
        ),
        (
            inventory(2),
            PlacementRequest(2, transport="nccl"),
            ["transport=nccl", "rollout.engine.colocated=false", "shared"],
        ),
        (
            inventory(2),
            PlacementRequest(1, colocated=False, transport="cuda_ipc"),
            ["transport=cuda_ipc", "not shared"],
        ),
        (inventory(2), PlacementRequest(1, transport="gloo"), ["transport=gloo works with CPUs"]),
        (inventory(2), PlacementRequest(1, transport="shm"), ["transport=shm"]),
    ],
)
def test_refusal(hosts, wanted, words):
    with pytest.raises(UserError) as caught:
        place(hosts, wanted)
    for word in words:
        assert word in str(caught.value)
    assert str(caught.value).count(".\n") == 0


@st.composite
def inventories(draw: st.DrawFn) -> Inventory:
    counts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    if draw(st.booleans()):
        return inventory(*counts)
    started = draw(st.permutations(range(draw(st.integers(1, 8)))))
    owner = [draw(st.sampled_from("abcd"[: len(counts)])) for _ in started]
    ranks = {name: tuple(r for r, o in zip(started, owner, strict=True) if o == name) for name in "abcd"[: len(counts)]}
    return inventory(*counts, **ranks)


wishes = st.builds(
    PlacementRequest,
    ranks=st.integers(1, 8),
    engines=st.integers(1, 6),
    tensor_parallel=st.integers(1, 4),
    colocated=st.none() | st.booleans(),
    transport=st.just("auto") | st.sampled_from(TRANSPORTS),
)


@settings(max_examples=500)  # most of them do not fit
@given(inventories(), wishes)
def test_any_placement_is_sound(hosts: Inventory, wanted: PlacementRequest):
    try:
        placed = place(hosts, wanted)
    except UserError as error:
        assert any(key in str(error) for key in ("parallel.", "rollout.engine."))
        return
    assert placed == place(hosts, wanted)
    cuda = any(host.devices for host in hosts.hosts)
    by_name = {host.name: {device.index for device in host.devices} for host in hosts.hosts}
    assert [p.rank for p in placed.ranks] == list(range(wanted.ranks))
    assert len(placed.engines) == wanted.engines
    for host in hosts.hosts:
        if host.ranks is not None:
            assert {p.rank for p in placed.ranks if p.host == host.name} == set(host.ranks)
    if not cuda:
        assert all(p.device is None for p in placed.ranks) and not any(e.devices for e in placed.engines)
        return
    of_ranks = [(p.host, p.device) for p in placed.ranks]
    of_engines = [(e.host, device) for e in placed.engines for device in e.devices]
    assert all(device in by_name[host] for host, device in of_ranks + of_engines)
    assert len(set(of_ranks)) == wanted.ranks
    assert len(set(of_engines)) == wanted.engines * wanted.tensor_parallel
    assert all(len(e.devices) == wanted.tensor_parallel for e in placed.engines)
    if placed.colocated:
        assert set(of_engines) <= set(of_ranks)
    else:
        assert not set(of_engines) & set(of_ranks)
    assert placed.transport in (("cuda_ipc", "disk") if placed.colocated else ("nccl", "disk"))


@settings(max_examples=500)  # most of them do not fit
@given(inventories(), wishes)
def test_disk_works_wherever_the_rest_fits(hosts: Inventory, wanted: PlacementRequest):
    try:
        place(hosts, replace(wanted, transport="auto"))
    except UserError:
        return
    assert place(hosts, replace(wanted, transport="disk")).transport == "disk"


def test_engines_go_only_where_ray_is_and_ranks_only_where_they_may():
    controller = Host("a", "10.0.0.0", ranks=(), rollout=False)
    nodes = Host("b", "10.0.0.1"), Host("c", "10.0.0.2")
    placed = place(Inventory((controller, *nodes)), PlacementRequest(2, engines=2))
    assert placed.ranks == ranks_at(("b", None), ("c", None))
    assert [engine.host for engine in placed.engines] == ["b", "c"]
    with_gpus = Inventory((controller, *(replace(node, devices=gpus(0, 1)) for node in nodes)))
    placed = place(with_gpus, PlacementRequest(3, engines=3))
    assert placed.ranks == ranks_at(("b", 0), ("b", 1), ("c", 0))
    assert placed.engines == engines_at(("b", (0,)), ("c", (0,)), ("b", (1,)))
    # Ranks that others have started, on a host that did not join.
    elsewhere = Inventory((Host("a", ranks=()), Host("b", "10.0.0.1", ranks=(0,), rollout=False)))
    assert place(elsewhere, PlacementRequest(1)).engines == engines_at(("a", ()))
    with pytest.raises(UserError, match=r"share the hosts of the ranks \(b\).*run `mfleet node` there"):
        place(elsewhere, PlacementRequest(1, colocated=True))
    one = Inventory((Host("a", ranks=()), Host("b", "10.0.0.1", gpus(0), ranks=(0,), rollout=False)))
    with pytest.raises(UserError, match=r"1 × 1 GPUs do not fit into the 0 that the ranks have .*\(0 on a\)"):
        place(one, PlacementRequest(1))


def test_evaluation_engines_are_on_devices_that_nobody_else_uses():
    wanted = PlacementRequest(2, engines=1, tensor_parallel=2, colocated=False, eval_engines=2)
    placed = place(inventory(4, 4), wanted)
    assert placed.engines == engines_at(("a", (2, 3)))
    assert [(one.host, one.devices) for one in placed.eval_engines] == [("b", (0, 1)), ("b", (2, 3))]
    assert all(one.evaluation for one in placed.eval_engines)
    rest = place(inventory(4, 4), replace(wanted, engines=None, eval_engines=1))
    assert rest.engines == engines_at(("a", (2, 3)), ("b", (0, 1)))
    assert [(one.host, one.devices) for one in rest.eval_engines] == [("b", (2, 3))]
    assert place(inventory(2, 2), replace(wanted, engines=None, eval_engines=1)).engines == ()
    with pytest.raises(UserError, match=r"\(0 \+ 1\) × 2 GPUs do not fit into the 0"):
        place(inventory(2), replace(wanted, engines=None, eval_engines=1))
    assert placed.transport == "nccl"
    with pytest.raises(
        UserError, match=r"\(rollout.engine.replicas \+ eval.engines\) × .* = \(1 \+ 2\) × 2 GPUs do not"
    ):
        place(inventory(4, 2), wanted)
    for kind in (True, None):
        with pytest.raises(UserError, match=r"^eval\.engines=2 needs rollout\.engine\.colocated=false"):
            place(inventory(8), replace(wanted, colocated=kind))


def test_evaluation_engines_follow_the_others_on_hosts_without_devices():
    placed = place(inventory(0, 0), PlacementRequest(1, engines=1, eval_engines=2))
    assert [engine.host for engine in placed.engines] == ["a"]
    assert [engine.host for engine in placed.eval_engines] == ["b", "a"]
    config = load(["experiment=quickstart", "eval.engines=1", "eval.at_start=true"])
    wanted = PlacementRequest.of(config.ranks, config.rollout.engine, config.eval.engines)
    assert (wanted.engines, wanted.eval_engines) == (1, 1)
    assert PlacementRequest.of_evaluation(config.rollout.engine).eval_engines == 0
