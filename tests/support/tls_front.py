"""TLS in front of a server that has none, in a process of its own.

Run as a script: target port, key, certificate. Prints the port that it listens on.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import sys
from pathlib import Path


def certificate(folder: Path) -> tuple[Path, Path]:
    """A key and a certificate for 127.0.0.1, made by openssl."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", str(key), "-out", str(cert), "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return key, cert


class TlsFront:
    """Listens on loopback with TLS, forwards to ``target`` without."""

    def __init__(self, target: int, key: Path, cert: Path) -> None:
        command = [sys.executable, __file__, str(target), str(key), str(cert)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


async def serve(target: int, key: str, cert: str) -> None:
    """Forward until killed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        below, above = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(_pump(reader, above), _pump(below, writer))

    server = await asyncio.start_server(client, "127.0.0.1", 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, ssl.SSLError):
        while data := await reader.read(1 << 18):
            writer.write(data)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
