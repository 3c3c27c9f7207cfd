#!/bin/sh
# Carry Sfumato into a room without a network.
#
#   sh docs/closed-room.sh pack FOLDER      outside, in a clone: packs the wheels of every package in requirements.lock
#   sh docs/closed-room.sh image FOLDER     outside, in a clone: saves the container as a file, for Docker or Apptainer
#   sh closed-room.sh install VENV          inside, in FOLDER: checks every hash, then installs, without a network
#
# `pack` and `image` print the SHA-256 of FOLDER/SHA256SUMS. Inside, compare it with `sha256sum SHA256SUMS`.
set -eu
python=${PYTHON:-python3.11}

hashes() { # of every file of the folder except the list itself, in a fixed order
    find . ! -type d ! -path ./SHA256SUMS | LC_ALL=C sort | xargs sha256sum
}

list() {
    cp docs/closed-room.sh "$1/closed-room.sh"
    (cd "$1" && hashes > SHA256SUMS && sha256sum SHA256SUMS)
}

case "${1:-}" in
pack)
    mkdir -p "$2/wheels"
    "$python" -m pip wheel --quiet --require-hashes --requirement requirements.lock --wheel-dir "$2/wheels"
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$2/wheels" .
    list "$2"
    ;;
image)
    mkdir -p "$2"
    docker build --tag sfumato .
    docker save --output "$2/sfumato.tar" sfumato
    printf 'Bootstrap: docker-archive\nFrom: sfumato.tar\n' > "$2/sfumato.def"
    list "$2"
    ;;
install)
    if ! hashes | diff SHA256SUMS -; then
        echo "the folder is not what SHA256SUMS lists (< listed, > found): nothing was installed"
        exit 1
    fi
    "$python" -m venv "$2"
    "$2/bin/python" -m pip install --quiet --no-index --no-deps wheels/*.whl
    "$2/bin/python" -c 'import sfumato; print("installed: sfumato", sfumato.__version__)'
    ;;
*)
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
