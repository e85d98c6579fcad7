#!/usr/bin/env bash
# Make .venv-NAME with one engine, this package and what its tests need. Does nothing when it is up to date.
#
# What to install is in tools/engines/NAME-requirements.txt, every package with its version: pip is not
# asked to resolve anything, as engines ask for builds of torch that a machine without a GPU cannot use.
# Debian's packages, if any, are in tools/engines/NAME-libraries.txt, a line each: soname, package.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { printf 'setup: %s\n' "$@" >&2; exit 1; }

readonly name=${1:-}
readonly requirements=tools/engines/$name-requirements.txt
readonly libraries=tools/engines/$name-libraries.txt
readonly venv=.venv-$name
readonly stamp=$venv/.installed       # where, and from what, the finished one was made: three lines
readonly unfinished=$venv/.unfinished # there while one is being made

[[ $# == 1 && $name =~ ^[a-z0-9]+$ && -e $requirements ]] || fail "usage: tools/setup_engine.sh NAME" \
    "NAME is one of: $(cd tools/engines && ls | sed -n 's/-requirements\.txt$//p' | tr '\n' ' ')"

digest() { cat "$@" | sha256sum | cut -d' ' -f1; }

# Install the shared libraries that the engine is linked with and does not bring along.
install_libraries() {
    local soname package missing=() as_root=()
    [[ -e $libraries ]] || return 0
    while read -r soname package; do
        [[ $soname == '#'* || -z $soname ]] && continue
        "$venv/bin/python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$soname" 2>/dev/null ||
            missing+=("$package")
    done <"$libraries"
    [[ ${#missing[@]} == 0 ]] && return 0
    [[ $(id -u) == 0 ]] || as_root=(sudo -n)
    as_root+=(env DEBIAN_FRONTEND=noninteractive apt-get)
    say "installing ${missing[*]}"
    "${as_root[@]}" install -y --no-install-recommends "${missing[@]}" >&2 ||
        { "${as_root[@]}" update >&2 &&
            "${as_root[@]}" install -y --no-install-recommends "${missing[@]}" >&2; } ||
        fail "these are needed: sudo apt-get install -y ${missing[*]}"
}

make_venv() {
    # The interpreter that makes .venv makes this one too.
    tools/setup.sh
    say "making $venv; this takes minutes, and about 3 GB"
    rm -rf "$venv"
    mkdir "$venv"
    touch "$unfinished"
    .venv/bin/python -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$requirements" ||
        fail "pip could not install everything; see above. Run it again when the cause is gone."
}

main() {
    local want=("$PWD" "$(digest tools/setup_engine.sh "$requirements")" "$(digest pyproject.toml constraints-dev.txt)")
    local has=()
    [[ ! -e $libraries ]] || want[1]=$(digest tools/setup_engine.sh "$requirements" "$libraries")
    [[ ! -e $stamp ]] || mapfile -t has <"$stamp"
    if [[ ! -x $venv/bin/python || -e $unfinished || ${has[*]:0:2} != "${want[*]:0:2}" ]]; then
        # One that was interrupted may hold half-written packages that pip takes for whole ones, one that was
        # made from another list may hold what is no longer on it, and one belongs to one place: its scripts
        # and the editable install hold the path.
        make_venv
    elif [[ ${has[*]} == "${want[*]}" ]]; then
        return
    fi
    touch "$unfinished"
    # The constraints of both lists: what they disagree on, pip refuses.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        -c "$requirements" -c constraints-dev.txt -e . hypothesis pytest pytest-asyncio pytest-timeout ||
        fail "pip could not install the package beside $name; see above."
    install_libraries
    printf '%s\n' "${want[@]}" >"$stamp"
    rm "$unfinished"
    say "$venv is ready"
}

main
