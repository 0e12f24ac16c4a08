#!/bin/bash
# Prints the path of a command that a package of PyPI brings, installed on the first call into the user's
# cache: third_party/pip_tool.sh buf-bin==1.75.0 buf
set -euo pipefail
package=$1 command=$2
venv=${XDG_CACHE_HOME:-$HOME/.cache}/summaryd/$package
if [[ ! -x $venv/bin/$command ]]; then
  rm -rf "$venv"
  python3 -m venv "$venv" >&2
  "$venv/bin/pip" install -q --disable-pip-version-check "$package" >&2
fi
echo "$venv/bin/$command"
