#!/bin/sh
# Makes stand-ins, under the official names, for those images of docker-compose.yml that this engine lacks.
#
#     tests/e2e/stand_in_images.sh PYTHON FOLDER
#
# PYTHON is the project's interpreter (.venv/bin/python), FOLDER a place for 2 GB of temporary files. All are made from Debian's
# packages and PyPI's, for machines that reach no registry of images: the base by debootstrap (which needs root, and a minute);
# Triton from the nvidia-pytriton wheel in NVIDIA's layout, without C++ backends, so that our Python stand-ins serve there;
# Prometheus and Alertmanager of perf/programs.py; haproxy from Debian; Locust from PyPI. Grafana is no Debian package: there is no
# stand-in for it.
# Images that are there already (the real ones) are left alone.
set -eu
python=$1
mkdir -p "$2"
work=$(mktemp -d "$2/images.XXXXXX")
project=$(cd "$(dirname "$0")/../.." && pwd)
lock=$project/requirements.lock
minor=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
base=tritonpilot/stand-in-base:bookworm
trap 'rm -rf "$work"' EXIT

lacks() { ! docker image inspect "$1" >/dev/null 2>&1; }

make_image() { # NAME FOLDER: the Dockerfile comes from stdin
    cat >"$2/Dockerfile"
    docker build --quiet --tag "$1" "$2" >/dev/null 2>"$work/build.log" || { cat "$work/build.log" >&2; return 1; }
    rm -rf "$2"
    echo "stand_in_images.sh: made $1"
}

packages() { # FOLDER REQUIREMENT...: what the lock says of them, for the base's Python
    folder=$1
    shift
    "$python" -m pip install -qq --disable-pip-version-check --no-warn-conflicts --constraint "$lock" --target "$folder" "$@"
}

if lacks "$base"; then
    [ "$minor" = 3.11 ] || { echo "stand_in_images.sh: Debian bookworm has Python 3.11, $python is $minor. Nothing was made." >&2; exit 1; }
    debootstrap --variant=minbase --include=ca-certificates,curl,haproxy,libpython3.11,procps,python3,python3-pip,wget \
        bookworm "$work/base" >"$work/debootstrap.log" 2>&1 || { tail -n 20 "$work/debootstrap.log" >&2; exit 1; }
    rm -rf "$work/base/var/cache/apt/archives" "$work/base/var/lib/apt/lists"
    tar -C "$work/base" --numeric-owner -c . | docker import - "$base" >/dev/null
    rm -rf "$work/base"
    echo "stand_in_images.sh: made $base"
fi

if lacks nvcr.io/nvidia/tritonserver:24.10-py3; then
    triton=$work/triton/opt/tritonserver
    mkdir -p "$triton/bin" "$triton/backends" "$triton/caches"
    site=$("$python" -c 'import importlib.metadata as m; print(m.distribution("nvidia-pytriton").locate_file(""))')
    cp "$site/pytriton/tritonserver/bin/tritonserver" "$triton/bin/"
    cp -r "$site/nvidia_pytriton.libs" "$triton/lib"
    cp -r "$site/pytriton/tritonserver/backends/python" "$triton/backends/"
    cp "$site/pytriton/tritonserver/python_backend_stubs/$minor/triton_python_backend_stub" "$triton/backends/python/"
    cp -r "$site/pytriton/tritonserver/caches/local" "$triton/caches/"
    packages "$work/triton/packages" numpy onnxruntime setuptools wheel
    packages "$work/triton/packages" --no-deps pillow tokenizers opencv-python-headless
    # pip takes the setuptools above: 0 means no isolated build environment
    make_image nvcr.io/nvidia/tritonserver:24.10-py3 "$work/triton" <<END
FROM $base
COPY opt/ /opt/
COPY packages/ /usr/local/lib/python$minor/dist-packages/
RUN useradd --uid 1000 triton-server && chmod -R a+rX /opt/tritonserver
ENV PATH=/opt/tritonserver/bin:\$PATH LD_LIBRARY_PATH=/opt/tritonserver/lib PIP_NO_BUILD_ISOLATION=0
END
fi

if lacks python:3.11-slim; then
    packages "$work/python/packages" --requirement "$project/deploy/pilot/requirements.txt" wheel
    make_image python:3.11-slim "$work/python" <<END
FROM $base
COPY packages/ /usr/local/lib/python$minor/dist-packages/
ENV PIP_NO_BUILD_ISOLATION=0
END
fi

for each in prometheus:v3.5.0 alertmanager:v0.28.1; do
    name=${each%:*}
    if lacks "prom/$each"; then
        program=$(cd "$project" && "$python" -c "from perf.programs import find; print(find('$name'))")
        mkdir -p "$work/$name/share"
        cp -L "$program" "$work/$name/$name"
        # Debian's Alertmanager has its templates there.
        cp -r "$(dirname "$program")/../share/prometheus/." "$work/$name/share/"
        make_image "prom/$each" "$work/$name" <<END
FROM $base
COPY $name /bin/$name
COPY share/ /usr/share/prometheus/
RUN mkdir /$name && chown nobody:nogroup /$name
USER nobody
ENTRYPOINT ["/bin/$name"]
END
    fi
done

if lacks locustio/locust:2.18.4; then
    packages "$work/locust/packages" --requirement "$project/deploy/pilot/requirements.txt" locust==2.18.4
    make_image locustio/locust:2.18.4 "$work/locust" <<END
FROM $base
COPY packages/ /usr/local/lib/python$minor/dist-packages/
RUN useradd --uid 1000 locust
USER locust
ENTRYPOINT ["python3", "-m", "locust"]
END
fi

if lacks haproxy:3.0.11-alpine; then
    mkdir "$work/haproxy"
    make_image haproxy:3.0.11-alpine "$work/haproxy" <<END
FROM $base
USER haproxy
CMD ["haproxy", "-W", "-db", "-f", "/usr/local/etc/haproxy/haproxy.cfg"]
END
fi
