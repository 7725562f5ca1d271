#!/bin/sh
# Build the wheel and the sdist from what is tracked, install each into a fresh environment away
# from the checkout, and run the demo and tests there, with nothing of the checkout in reach.
#
# The sdist's environment runs all its tests but the slow ones; the wheel's runs SHORT, on this
# Python and on every other one of 3.11 to 3.13 that is found (python3.x, or one of pyenv's).
# Usage: sh tests/release-check.sh PYTHON [ARGUMENTS OF PYTEST, instead of the choice above]
set -eu
SHORT="tests/cli tests/data tests/test_dependencies.py tests/test_front_python.py \
  tests/test_model.py tests/test_model_folder.py tests/docs/test_packaging.py"
python=$1
shift
home=$(pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH
began=$(date +%s)
told=""

say() { echo "[$(($(date +%s) - began)) s] $*"; }
version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

others() { # each other Python that can be found, one a line
  for minor in 11 12 13; do
    [ "$(version "$python")" != "3.$minor" ] || continue
    for found in "python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.$minor.*/bin/python; do
      if [ "$(version "$found")" = "3.$minor" ]; then echo "$found"; break; fi
    done
  done
}

check() { # PYTHON BUILT ARGUMENTS OF PYTEST: installed afresh, the demo, then tests
  where="$(basename "$2") on Python $(version "$1")"
  say "installing $where"
  rm -rf "$work/fresh" "$work/demo"
  "$1" -m venv "$work/fresh"
  "$work/fresh/bin/python" -m pip --disable-pip-version-check install --quiet \
    -c "$home/constraints.txt" "$2[dev]"
  shift 2
  say "demo of $where"
  (cd "$work" && fresh/bin/dpscaffold --version && fresh/bin/dpscaffold demo --rounds 5 --out demo)
  say "tests of $where: $*"
  (cd "$work/source" && "$work/fresh/bin/python" -m pytest -n 2 -m "not slow" "$@")
  told="$told$where: $*
"
}

"$python" -m venv "$work/builder"
"$work/builder/bin/python" -m pip --disable-pip-version-check install --quiet build twine
mkdir "$work/tree" "$work/source"  # building leaves nothing in the checkout
git ls-files | tar -cf - -T - | tar -xf - -C "$work/tree"
"$work/builder/bin/python" -m build --quiet --outdir "$work/dist" "$work/tree"
"$work/builder/bin/python" -m twine check --strict "$work"/dist/*
tar -xzf "$work"/dist/*.tar.gz -C "$work/source" --strip-components=1
rm -rf "$work/source/src"  # what is tested is what was installed

if [ $# -eq 0 ]; then
  # shellcheck disable=SC2086  # SHORT is a list
  set -- $SHORT
  whole=tests
else
  whole="$*"
fi
check "$python" "$work"/dist/*.whl "$@"
for other in $(others); do check "$other" "$work"/dist/*.whl "$@"; done
# shellcheck disable=SC2086
check "$python" "$work"/dist/*.tar.gz $whole
say "both are fit to be released; demo and tests passed:"
printf "%s" "$told"
