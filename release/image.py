#!/usr/bin/env python3
"""Writes an OCI image as a tar file: the program, the library for Envoy, the C library and the CA certificates of this
machine.

    release/image.py PROGRAM LIBRARY OUTPUT NAME:TAG

No shell, no package manager, user 65532. Equal inputs give equal bytes; SOURCE_DATE_EPOCH is the time of all files.
`podman load -i`, `docker load -i` (25 or later), `kind load image-archive` and `skopeo copy oci-archive:` read the file.
"""

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import time

CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
USER = 65532
# Ports of ext-proc, gRPC health and metrics.
PORTS = (9002, 9003, 9090)


def libraries(program):
    """Pairs of the path in the image and the file on this machine, of each library that `program` needs."""
    text = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    paths = re.findall(r"(?:=> )?(/\S+) \(0x", text)
    if not paths:
        raise SystemExit(f"image: ldd finds no libraries of {program}:\n{text}")
    return [(path.removeprefix("/"), os.path.realpath(path)) for path in paths]


def package_of(path):
    """Name and version of the Debian package with this file."""
    # The database knows the file under /lib or under /usr/lib.
    for name in (path, "/usr" + path, path.removeprefix("/usr")):
        found = subprocess.run(["dpkg-query", "-S", name], capture_output=True, text=True)
        if found.returncode == 0:
            package = found.stdout.split(":")[0]
            shown = subprocess.run(["dpkg-query", "-W", "-f", "${Package} ${Version}", package], check=True, capture_output=True, text=True)
            return shown.stdout
    raise SystemExit(f"image: no package has {path}")


def layer(entries, moment):
    """A layer's tar of (path, content or None for a directory, mode) in the order of paths."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path, content, mode in sorted(entries, key=lambda entry: entry[0]):
            info = tarfile.TarInfo(path)
            info.mtime, info.mode = moment, mode
            if content is None:
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def with_directories(files):
    """The files, and each directory above one of them."""
    directories = set()
    for path, _, _ in files:
        while path := os.path.dirname(path):
            directories.add(path)
    return [(path, None, 0o755) for path in directories] + files


def read(path):
    with open(path, "rb") as file:
        return file.read()


def digest(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


def main():
    if len(sys.argv) != 5:
        raise SystemExit(__doc__)
    program, library, output, reference = sys.argv[1:]
    name, version = reference.rsplit(":", 1)
    moment = int(os.environ["SOURCE_DATE_EPOCH"])
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))

    needed = libraries(program)
    packages = sorted({package_of(found) for _, found in needed})
    system = [(path, read(found), 0o755) for path, found in needed]
    system += [
        (CERTIFICATES.removeprefix("/"), read(CERTIFICATES), 0o644),
        ("etc/passwd", f"attache:x:{USER}:{USER}::/:/nonexistent\n".encode(), 0o644),
        ("etc/group", f"attache:x:{USER}:\n".encode(), 0o644),
        ("etc/nsswitch.conf", b"hosts: files dns\n", 0o644),
    ]
    own = [
        ("usr/local/bin/attache", read(program), 0o755),
        ("usr/local/lib/attache/libattache_envoy.so", read(library), 0o755),
    ]
    layers = [layer(with_directories(files), moment) for files in (system, own)]

    blobs = {}

    def blob(data, media_type, **more):
        blobs[digest(data)] = data
        return {"mediaType": media_type, "digest": digest(data), "size": len(data), **more}

    def document(value, media_type, **more):
        return blob(json.dumps(value, sort_keys=True, separators=(",", ":")).encode(), media_type, **more)

    described = [blob(gzip.compress(data, 9, mtime=0), "application/vnd.oci.image.layer.v1.tar+gzip") for data in layers]
    config = document({
        "architecture": "amd64", "os": "linux", "created": created,
        "config": {
            "User": f"{USER}:{USER}",
            "Entrypoint": ["/usr/local/bin/attache"],
            "Cmd": ["run"],
            "ExposedPorts": {f"{port}/tcp": {} for port in PORTS},
            "Env": [f"SSL_CERT_FILE={CERTIFICATES}"],
            "Labels": {
                "org.opencontainers.image.title": "attache",
                "org.opencontainers.image.version": version,
                "org.opencontainers.image.licenses": "Apache-2.0",
                "org.opencontainers.image.base.packages": ", ".join(packages),
            },
        },
        "rootfs": {"type": "layers", "diff_ids": [digest(data) for data in layers]},
        "history": [{"created": created, "created_by": what} for what in ("libraries and certificates", "attache")],
    }, "application/vnd.oci.image.config.v1+json")
    manifest = document({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config, "layers": described,
    }, "application/vnd.oci.image.manifest.v1+json", annotations={
        "org.opencontainers.image.ref.name": version,
        "io.containerd.image.name": reference,
    })
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [manifest]}
    # What `docker load` reads.
    docker = [{
        "Config": f"blobs/sha256/{config['digest'].removeprefix('sha256:')}",
        "RepoTags": [f"{name}:{version}"],
        "Layers": [f"blobs/sha256/{part['digest'].removeprefix('sha256:')}" for part in described],
    }]
    files = [(f"blobs/sha256/{name.removeprefix('sha256:')}", data, 0o644) for name, data in blobs.items()]
    files += [
        ("index.json", json.dumps(index, sort_keys=True).encode(), 0o644),
        ("manifest.json", json.dumps(docker, sort_keys=True).encode(), 0o644),
        ("oci-layout", b'{"imageLayoutVersion":"1.0.0"}', 0o644),
    ]
    with open(output, "wb") as file:
        file.write(layer(with_directories(files), moment))


if __name__ == "__main__":
    main()
