#!/usr/bin/env bash
# Make .venv with the package and its development tools. Does nothing when it is up to date.
#
# PYTHON=... picks the interpreter; otherwise python3 is taken when it will do, then
# python3.13, python3.12, python3.11.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=.venv
readonly stamp=$venv/.installed      # where, and from what, the finished .venv was made
readonly unfinished=$venv/.unfinished # there while a .venv is being made
readonly candidates=(python3 python3.13 python3.12 python3.11)
# What Mooncake's wheel is linked with and does not bring along: soname, Debian's package.
readonly libraries=(
    libibverbs.so.1 libibverbs1
    librdmacm.so.1 librdmacm1
    libnuma.so.1 libnuma1
    libcurl.so.4 libcurl4
)

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { printf 'setup: %s\n' "$@" >&2; exit 1; }

digest() { cat pyproject.toml constraints-dev.txt tools/setup.sh | sha256sum | cut -d' ' -f1; }

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
# Debian splits ensurepip off, and keeps a venv module that fails without it.
can_make_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

# Print the interpreter to use; it may still lack ensurepip.
find_python() {
    if [[ -n ${PYTHON:-} ]]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON is no program"
        is_new_enough "$PYTHON" || fail "PYTHON=$PYTHON is no Python 3.11 or newer: $("$PYTHON" --version 2>&1)"
        echo "$PYTHON"
        return
    fi
    local python found=
    for python in "${candidates[@]}"; do
        is_new_enough "$python" || continue
        found=${found:-$python}
        if can_make_venv "$python"; then
            echo "$python"
            return
        fi
    done
    [[ -n $found ]] || fail "Python 3.11 or newer is needed; none of ${candidates[*]} is one." \
        "Install it (Debian 12 or later, Ubuntu 24.04 or later: apt-get install python3 python3-venv)," \
        "or name one: make setup PYTHON=/path/to/python3.12"
    echo "$found"
}

# Install Debian packages; fail when that cannot be done.
apt_install() {
    local as_root=()
    command -v apt-get >/dev/null || return 1
    if [[ $(id -u) != 0 ]]; then
        sudo -n true 2>/dev/null || return 1
        as_root=(sudo -n)
    fi
    say "installing $*"
    # The lists may be absent or old: fetch them only when a package is not to be had.
    as_root+=(env DEBIAN_FRONTEND=noninteractive apt-get)
    "${as_root[@]}" install -y --no-install-recommends "$@" >&2 ||
        { "${as_root[@]}" update >&2 && "${as_root[@]}" install -y --no-install-recommends "$@" >&2; }
}

# Install Debian's package with ensurepip for interpreter $1, or say how to.
install_venv_module() {
    local package
    package=$("$1" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    apt_install "$package" || fail "$1 has no ensurepip, so it cannot make a venv." \
        "Install the package that holds it ($package on Debian and Ubuntu), then run make again:" \
        "  sudo apt-get install -y $package" \
        "or name another Python with PYTHON=..."
    can_make_venv "$1" || fail "$package is installed, and $1 still has no ensurepip: name another with PYTHON=..."
}

# Install the shared libraries that Mooncake needs, or say how to and go on without.
install_libraries() {
    local missing=() i
    for ((i = 0; i < ${#libraries[@]}; i += 2)); do
        "$venv/bin/python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "${libraries[i]}" 2>/dev/null ||
            missing+=("${libraries[i + 1]}")
    done
    [[ ${#missing[@]} == 0 ]] && return
    apt_install "${missing[@]}" ||
        say "Mooncake cannot be used, and its tests are skipped, until these are installed:" \
            "sudo apt-get install -y ${missing[*]}"
}

main() {
    local want python
    # A .venv belongs to one place: its scripts and the editable install hold the path.
    want="$PWD $(digest)"
    if [[ -x $venv/bin/python && ! -e $unfinished && $(cat "$stamp" 2>/dev/null) == "$want" ]]; then
        return
    fi
    # One that was interrupted may hold half-written packages that pip takes for whole ones.
    if [[ -e $unfinished ]] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
        [[ -e $stamp && $(cat "$stamp") != "$PWD "* ]]; then
        python=$(find_python)
        can_make_venv "$python" || install_venv_module "$python"
        say "making $venv with $("$python" --version) ($python)"
        rm -rf "$venv"
        mkdir "$venv"
        touch "$unfinished"
        "$python" -m venv "$venv"
    fi
    touch "$unfinished"
    say "installing the package and its development tools; the first time this takes minutes"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -e '.[dev]' ||
        fail "pip could not install everything; see above. Run make again when the cause is gone."
    install_libraries
    echo "$want" >"$stamp"
    rm "$unfinished"
    say "$venv is ready"
}

main
