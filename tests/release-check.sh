#!/bin/sh
# Build the wheel and the sdist, install each into a fresh environment away from the checkout, and
# run the demo and the sdist's own tests there, with nothing of the checkout in reach.
# Usage: sh tests/release-check.sh PYTHON [ARGUMENTS OF PYTEST; all tests but the slow ones without]
set -eu
python=$1
shift
home=$(pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH
"$python" -m venv "$work/builder"
"$work/builder/bin/python" -m pip --disable-pip-version-check install --quiet build twine
mkdir "$work/tree"  # what is tracked and nothing else; building leaves nothing in the checkout
git ls-files | tar -cf - -T - | tar -xf - -C "$work/tree"
"$work/builder/bin/python" -m build --quiet --outdir "$work/dist" "$work/tree"
"$work/builder/bin/python" -m twine check --strict "$work"/dist/*
mkdir "$work/source"
tar -xzf "$work"/dist/*.tar.gz -C "$work/source" --strip-components=1
rm -rf "$work/source/src"  # what is tested is what was installed
for built in "$work"/dist/*.whl "$work"/dist/*.tar.gz; do
  echo "checking $(basename "$built")"
  rm -rf "$work/fresh"
  "$python" -m venv "$work/fresh"
  "$work/fresh/bin/python" -m pip --disable-pip-version-check install --quiet \
    -c "$home/constraints.txt" "$built[dev]"
  (cd "$work" && fresh/bin/dpscaffold --version && fresh/bin/dpscaffold demo --rounds 5 \
    --out "$work/demo-$(basename "$built")")
  (cd "$work/source" && "$work/fresh/bin/python" -m pytest -n 2 -m "not slow" "$@")
done
echo "both are fit to be released"
