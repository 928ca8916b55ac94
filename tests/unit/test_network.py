"""Addresses and ports: where a process listens, under which address it is reached, and which transport leads there."""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from fake_generator import FakeGenerator
from fleet import Fleet

from inflight.bus import Link, Listener, Received, make_keys
from inflight.config import BusConfig, ConfigError, PublishConfig
from inflight.config.effect import require_effect
from inflight.config.network import NetworkConfig, joined, parted
from inflight.launcher.compose import compose
from inflight.listening import interface_of, listen, nccl_settings, source_of
from inflight.messages import BucketMeta, Commit, Place, Refused
from inflight.weights.publish.publisher import Publisher
from inflight.weights.source import WeightSource
from inflight.weights.transport import make_receiver, make_sender
from inflight.weights.transport.base import TransportError
from inflight.weights.transport.choice import TransportChoice
from inflight.weights.transport.gloo import GlooReceiver
from inflight.weights.transport.place import place_of
from inflight.weights.transport.rendezvous import KeyValueStore

LIMIT_S = 20.0
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"bind": "host.example"}, "network.bind='host.example'"),
        ({"bind": "0.0.0.0"}, "network.bind='0.0.0.0'"),
        (
            {"bind": "fe80::1%eth0"},
            "network.bind='fe80::1%eth0' is not allowed: an IP address of one interface, not link",
        ),
        ({"bind": "fe80::1"}, "network.bind='fe80::1'"),
        ({"bind": "239.1.1.1"}, "network.bind='239.1.1.1'"),
        ({"advertise": "10.0.0.1"}, "network.advertise='10.0.0.1'"),
        ({"bind": "10.0.0.1", "advertise": "::"}, "network.advertise='::'"),
        ({"ports": "20000"}, "network.ports='20000'"),
        ({"ports": "20001-20000"}, "network.ports"),
        ({"ports": "80-90"}, "network.ports"),
        ({"ports": "1024-70000"}, "network.ports"),
    ],
)
def test_what_is_no_address_or_range_is_refused(values: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        NetworkConfig(**values)


@pytest.mark.parametrize("host", ["10.0.0.2", "::1", "fd00::2"])
def test_an_address_with_its_port_is_read_as_it_was_written(host: str) -> None:
    assert parted(joined(host, 5700)) == (host, 5700)


@pytest.mark.parametrize(
    "text", ["", "10.0.0.2", ":5700", "::1:5700", "[10.0.0.2]:1", "a.b:1", "10.0.0.2:x", "[::1]:0"]
)
def test_what_is_no_address_with_a_port_is_not_read(text: str) -> None:
    with pytest.raises(ValueError, match="no IP address with a port"):
        parted(text)


def test_one_listens_on_the_own_address_in_the_range_and_says_when_it_is_full() -> None:
    with listen(NetworkConfig()) as free:
        first = free.getsockname()[1]
    network = NetworkConfig(bind="127.0.0.2", ports=f"{first}-{first + 1}")
    with listen(network) as one, listen(network) as other:
        assert {each.getsockname() for each in (one, other)} == {("127.0.0.2", first), ("127.0.0.2", first + 1)}
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", first), timeout=LIMIT_S)
        with pytest.raises(
            OSError, match=rf"no free port on 127\.0\.0\.2 among {first}-{first + 1} \(network\.ports\)"
        ):
            listen(network)
    with pytest.raises(OSError, match=r"can't listen on 192\.0\.2\.1"):
        listen(NetworkConfig(bind="192.0.2.1"))


def test_the_own_address_and_interface_towards_another_host_are_found() -> None:
    assert source_of("127.0.0.9") == "127.0.0.1"
    assert source_of("::1") == "::1"
    assert interface_of("127.0.0.1") == "lo"
    assert nccl_settings(NetworkConfig(), {}) == {}
    found = nccl_settings(NetworkConfig(bind="127.0.0.1"), {})
    assert found == {"NCCL_SOCKET_IFNAME": "=lo", "NCCL_SOCKET_FAMILY": "AF_INET"}
    assert nccl_settings(NetworkConfig(bind="127.0.0.1"), {"NCCL_SOCKET_IFNAME": "eth0"}) == {}
    with pytest.raises(OSError, match=r"192\.0\.2\.1 \(network\.bind\)"):
        nccl_settings(NetworkConfig(bind="192.0.2.1"), {})


@pytest.mark.parametrize(
    ("options", "connects", "listens"),
    [
        ([], "ipc://", "ipc://"),
        (["bus.address=10.0.0.1"], "tcp://10.0.0.1:5700", "tcp://10.0.0.1:5700"),
        (["network.bind=10.0.0.1"], "tcp://10.0.0.1:5700", "tcp://10.0.0.1:5700"),
        (["network.bind=fd00::1"], "tcp://[fd00::1]:5700", "tcp://[fd00::1]:5700"),
        (["network.bind=10.0.0.1", "network.advertise=192.0.2.7"], "tcp://192.0.2.7:5700", "tcp://10.0.0.1:5700"),
        (["network.bind=10.0.0.2", "bus.address=10.0.0.1"], "tcp://10.0.0.1:5700", "tcp://10.0.0.2:5700"),
    ],
)
def test_control_sockets_follow_the_address(tmp_path: Path, options: list[str], connects: str, listens: str) -> None:
    run = compose("tiny", [f"run_dir={tmp_path}", *options])
    assert run.endpoint("weights").startswith(connects)
    assert run.listening("weights").startswith(listens)
    assert run.over_tcp == bool(options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["network.ports=5700-5800"], "network.ports='5700-5800' is not allowed: without the ports of the control"),
        (["network.ports=5000-5703"], "5700 to 5705"),
        (["network.ports=5705-5705"], "bus.port"),
        (["network.ports=20000-20999", "bus.port=20994"], "20994 to 20999"),
        (["network.ports=5706-5800"], ""),
        (["network.ports=5600-5699"], ""),
        (["bus.address=10.0.0.1"], "bus.address is set and has no effect: control sockets listen on network.bind"),
    ],
)
def test_what_listens_takes_no_port_of_a_control_socket(tmp_path: Path, options: list[str], said: str) -> None:
    """A generator that started first would take it, at times."""
    with pytest.raises(ConfigError) if said else contextlib.nullcontext() as caught:
        require_effect(compose("tiny", [f"run_dir={tmp_path}", "network.bind=10.0.0.1", *options]))
    assert said in str(caught.value if said else "")


def test_control_over_ipv6_with_keys(tmp_path: Path) -> None:
    make_keys(tmp_path, ["g0"])
    bus = BusConfig(keys=str(tmp_path))
    with Listener("tcp://[::1]:*", bus) as listener, Link(listener.endpoint, "g0", bus) as link:
        link.send(Commit(version=3))
        assert listener.receive(LIMIT_S) == Received("g0", Commit(version=3))


@pytest.mark.parametrize(("trainer", "generator"), [("127.0.0.2", "127.0.0.3"), ("::1", "::1"), ("", "")])
def test_bytes_and_their_rendezvous_take_the_addresses_of_both_sides(trainer: str, generator: str) -> None:
    buckets = [BucketMeta(offset=0, nbytes=1000), BucketMeta(offset=1000, nbytes=24)]
    sent = torch.randint(0, 256, (1024,), dtype=torch.uint8)
    got = torch.zeros_like(sent)
    sender = make_sender("gloo", 2, LIMIT_S, network=NetworkConfig(bind=trainer))
    assert sender.rendezvous.startswith(joined(trainer or "127.0.0.1", ""))
    receiver = GlooReceiver(sender.rendezvous, 1, 2, LIMIT_S, NetworkConfig(bind=generator))
    with ThreadPoolExecutor(2) as both:
        sending = both.submit(sender.send, sent, buckets)
        both.submit(receiver.receive, got, buckets).result(LIMIT_S)
        sending.result(LIMIT_S)
    assert torch.equal(sent, got)
    sender.close()
    receiver.close()


def test_the_keys_of_each_store_have_a_prefix_of_their_own() -> None:
    one, other = (KeyValueStore("", LIMIT_S, NetworkConfig(bind="127.0.0.2")) for _ in range(2))
    one.put("offer/0", b"weights")
    assert KeyValueStore(one.address, LIMIT_S).take("offer/0", "the trainer", "receive") == b"weights"
    place, _, prefix = one.address.partition("/")
    assert place.startswith("127.0.0.2:")
    assert prefix != other.address.partition("/")[2]
    guessed = KeyValueStore(f"{place}/{'0' * len(prefix)}", 0.1)
    with pytest.raises(TransportError, match="did not answer"):
        guessed.take("offer/0", "the trainer", "receive")
    with pytest.raises(TransportError, match="no rendezvous at"):
        KeyValueStore(f"host.example:1/{prefix}", LIMIT_S)


HERE = Place(host="h0", device="cuda", gpus=["GPU-0"], inflight="1.0", torch="2.11.0", vllm="0.33.0")


def place(**changes: object) -> Place:
    return msgspec.structs.replace(HERE, **changes)


def choice(configured: str = "auto", reason: str = "", *, gpu: str = "GPU-0", here: Place = HERE) -> TransportChoice:
    return TransportChoice(configured, GPU if gpu else CPU, lambda _: reason, here, gpu)


@pytest.mark.parametrize(
    ("places", "kind"),
    [
        ([HERE], "ipc"),
        ([None], "ipc"),
        ([place(gpus=["GPU-1", "GPU-0"])], "ipc"),
        ([place(gpus=["GPU-1"])], "nccl"),
        ([place(host="h1")], "nccl"),
        ([HERE, place(host="h1")], "nccl"),
        ([place(device="cpu", gpus=[])], "gloo"),
        ([place(device="cpu", gpus=[], host="h1")], "gloo"),
    ],
)
def test_auto_is_chosen_for_each_generator(places: list[Place | None], kind: str) -> None:
    assert choice().of(places) == kind


def test_auto_is_nccl_where_memory_can_not_be_mapped_and_gloo_without_a_gpu() -> None:
    assert choice(reason="expandable segments").of([HERE]) == "nccl"
    assert choice(gpu="").of([place(device="cpu", gpus=[])]) == "gloo"
    assert choice("nccl").of([HERE]) == "nccl"


@pytest.mark.parametrize(
    ("configured", "changes", "checksum", "said"),
    [
        ("auto", {}, "none", ""),
        ("auto", {"host": "h1"}, "none", ""),
        ("auto", {"torch": "2.13.0"}, "none", ""),  # CUDA IPC: nothing of torch is shared
        ("auto", {"host": "h1", "torch": "2.11.1"}, "none", ""),
        ("auto", {"host": "h1", "torch": "2.13.0"}, "none", "torch 2.13.0, the trainer 2.11.0"),
        ("auto", {"inflight": "1.1"}, "none", "inflight 1.1, the trainer 1.0"),
        ("ipc", {"host": "h1"}, "none", "publish.transport=ipc, and it is on another host"),
        ("nccl", {"device": "cpu"}, "none", "publish.transport=nccl, and it computes on a CPU"),
        ("auto", {"device": "cpu"}, "none", ""),
        ("auto", {"device": "cpu"}, "sum64", "publish.checksum=always"),
    ],
)
def test_what_can_not_be_sent_to_is_refused_by_name(
    configured: str, changes: dict[str, object], checksum: str, said: str
) -> None:
    objection = choice(configured).objection(place(**changes), checksum)
    assert said in objection
    assert bool(objection) == bool(said)


def test_generators_of_one_run_have_one_vllm() -> None:
    fleet = choice()
    assert not fleet.objection(HERE, "none")
    assert not fleet.objection(HERE, "none", "0.33.0")
    assert not fleet.objection(place(vllm=""), "none", "0.33.0")
    said = fleet.objection(place(vllm="0.32.0"), "none", "0.33.0")
    assert said == "it has vLLM 0.32.0, another generator of this run 0.33.0"


def test_a_generator_that_is_refused_or_gone_does_not_decide_which_vllm_others_have() -> None:
    fleet = Fleet(3, elastic=True)
    own = place_of(CPU)
    fleet.come("g0", msgspec.structs.replace(own, torch="1.0", vllm="0.1"))  # refused for its torch
    fleet.come("g1", msgspec.structs.replace(own, vllm="0.33.0"))
    assert [each.generator for each in fleet.protocol.replicas if each.state.present] == ["g1"]
    other = msgspec.structs.replace(own, vllm="0.32.0")
    fleet.come("g2", other)
    refused = {peer: message.reason for peer, message in fleet.queued if isinstance(message, Refused)}
    assert refused["g2.r0"] == "it has vLLM 0.32.0, another generator of this run 0.33.0"
    fleet.go("g1")
    fleet.come("g2", other)
    assert [each.generator for each in fleet.protocol.replicas if each.state.present] == ["g2"]


def test_this_process_knows_its_place() -> None:
    here = place_of(CPU)
    assert here == place_of(CPU)
    assert (here.device, here.gpus) == ("cpu", [])
    assert here.torch == torch.__version__.partition("+")[0]
    assert here.host


def test_a_publisher_reaches_generators_of_other_addresses_and_refuses_those_that_do_not_fit(tmp_path: Path) -> None:
    make_keys(tmp_path, ["g0", "g1"])
    bus, there = BusConfig(keys=str(tmp_path)), NetworkConfig(bind="127.0.0.3")
    fits = place_of(CPU)
    with Listener("tcp://127.0.0.2:*", bus) as listener:
        source = WeightSource(torch.nn.Linear(8, 8), "float32")
        publisher = Publisher(
            source,
            listener,
            PublishConfig(),
            version=0,
            ranks={"g0": 1, "g1": 1},
            network=NetworkConfig(bind="127.0.0.2"),
        )
        g0, g1 = (
            FakeGenerator(
                listener.endpoint, name, bus=bus, place=each, connect=lambda welcome: make_receiver(welcome, there)
            ).start()
            for name, each in (("g0", fits), ("g1", msgspec.structs.replace(fits, inflight="0.0.1")))
        )
        try:
            publisher.wait_joined(LIMIT_S, at_least=1)
            assert publisher.committed == {"g0": 0}
            assert "it has inflight 0.0.1" in publisher.states["g1"][1]
        finally:
            g0.close()
            g1.close()
            publisher.close()
