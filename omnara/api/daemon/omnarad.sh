#!/bin/sh
# Installs the daemon of the omnara server at @api_url@, so that its agents can run commands on this machine.
#
#   curl -fsS @api_url@/install/omnarad.sh | OMNARA_MACHINE_TOKEN=... sh
#
# Everything goes below $OMNARA_HOME (default: ~/.omnara). Needs Python 3.11 or later with venv and pip, which gets the
# libraries from where it gets everything else (PIP_INDEX_URL, pip.conf). Arguments go to `omnara daemon install`.
# Running it again updates the daemon; commands that run go on running.
set -eu
umask 077

api_url='@api_url@'
wheel_url='@wheel_url@'
wheel='@wheel@'
sha256='@sha256@'

say() {
    printf 'omnara: %s\n' "$*" >&2
}

fail() {
    say "$*"
    exit 1
}

check_url() {
    case "$api_url" in
        https://*) ;;
        http://127.0.0.1 | http://127.0.0.1[:/]* | http://localhost | http://localhost[:/]*) ;;
        'http://[::1]' | 'http://[::1]'[:/]*) ;;
        http://host.docker.internal | http://host.docker.internal[:/]*) ;;
        *) fail "$api_url is not https: the machine's token would travel in the open. Put the server behind https." ;;
    esac
}

find_python() {
    for python in "${OMNARA_PYTHON:-}" python3.13 python3.12 python3.11 python3; do
        if [ -n "$python" ] && "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
            >/dev/null 2>&1; then
            return
        fi
    done
    fail 'needs Python 3.11 or later with venv (on Debian and Ubuntu the package python3-venv); OMNARA_PYTHON names one'
}

fetch() {
    "$python" - "$wheel_url" "$1" "$sha256" <<'PYTHON'
import hashlib
import sys
import urllib.request

url, target, expected = sys.argv[1:]
request = urllib.request.Request(url, headers={"User-Agent": "omnarad.sh"})
try:
    with urllib.request.urlopen(request, timeout=60) as answer:
        content = answer.read(64 * 1024 * 1024)
except (OSError, ValueError) as error:
    sys.exit(f"omnara: cannot fetch {url}: {error}")
found = hashlib.sha256(content).hexdigest()
if found != expected:
    sys.exit(f"omnara: {url} has the digest {found}, not {expected}: nothing was installed")
with open(target, "xb") as file:
    file.write(content)
PYTHON
}

main() {
    check_url
    find_python
    home=${OMNARA_HOME:-${HOME:?HOME is not set}/.omnara}
    mkdir -p "$home"
    home=$(cd "$home" && pwd -P)
    work=$(mktemp -d "$home/.install.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    trap 'exit 1' HUP INT TERM

    say "fetching $wheel"
    fetch "$work/$wheel"

    # One environment for each release: what runs in the older one keeps its files.
    environment=$home/releases/$(printf '%.16s' "$sha256")
    if [ ! -x "$environment/bin/omnara" ]; then
        say "installing below $environment"
        rm -rf "$environment"
        mkdir -p "$home/releases"
        "$python" -m venv "$environment"
        "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$work/$wheel" ||
            fail 'pip could not install the daemon'
    fi
    rm -rf "$work"
    trap - EXIT

    mkdir -p "$home/bin"
    ln -sfn "$environment/bin/omnara" "$home/bin/omnara"

    OMNARA_HOME=$home OMNARA_API_URL=${OMNARA_API_URL:-$api_url} "$environment/bin/omnara" daemon install "$@" </dev/null
}

# All of it has arrived when this line is read: a script that is cut off does nothing.
main "$@"
