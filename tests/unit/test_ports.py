"""Reserved ports: nobody else gets them, and the task they are for can listen on them."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tfdist.launch import ports

FAMILIES = [socket.AF_INET, socket.AF_INET6]


def test_reserved_ports_are_different_and_on_this_machine():
    with ports.reserve(20) as held:
        assert len(set(held.ports)) == 20
        assert held.addresses == tuple(f"127.0.0.1:{port}" for port in held.ports)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reuse", [0, 1])
def test_nobody_who_asks_for_any_port_gets_a_reserved_one(family, reuse):
    with ports.reserve(50) as held:
        given = set()
        others = []
        for _ in range(3000):
            other = socket.socket(family, socket.SOCK_STREAM)
            others.append(other)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            other.bind(("", 0))
            given.add(other.getsockname()[1])
        for other in others:
            other.close()
        assert not given & set(held.ports)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_child_process_can_listen_on_a_reserved_port_and_be_reached(host):
    source = """
import socket, sys
host, port = sys.argv[1], int(sys.argv[2])
server = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
if ":" in host:
    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
server.bind((host, port))
server.listen()
print("listening", flush=True)
server.accept()[0].sendall(b"hello")
"""
    with ports.reserve(1) as held:
        command = [sys.executable, "-c", source, host, str(held.ports[0])]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"listening\n"
            with socket.create_connection(("127.0.0.1", held.ports[0]), timeout=10) as client:
                assert client.recv(5) == b"hello"


def test_a_reserved_port_refuses_connections_until_its_task_listens():
    with ports.reserve(1) as held, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", held.ports[0]), timeout=10)


def test_children_do_not_inherit_the_reservation():
    with ports.reserve(1) as held:
        listing = "import os; print(sum('socket' in os.readlink(f'/proc/self/fd/{n}') "
        listing += "for n in range(3, 64) if os.path.exists(f'/proc/self/fd/{n}')))"
        child = subprocess.run([sys.executable, "-c", listing], capture_output=True, check=True)
        assert child.stdout.strip() == b"0", held


def test_ports_are_free_again_afterwards():
    with ports.reserve(1) as held:
        pass
    with socket.socket() as server:
        server.bind(("127.0.0.1", held.ports[0]))
        server.listen()


def test_without_ipv6_the_reservation_is_for_ipv4(monkeypatch):
    real = socket.socket

    def only_ipv4(family, kind):
        if family == socket.AF_INET6:
            raise OSError("Address family not supported by protocol")
        return real(family, kind)

    monkeypatch.setattr(ports.socket, "socket", only_ipv4)
    with ports.reserve(2) as held:
        assert len(set(held.ports)) == 2
