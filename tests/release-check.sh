#!/bin/sh
# Build the wheel and the sdist, install each into a fresh environment away from the checkout, and
# run the demo and the sdist's own tests there. Usage: sh tests/release-check.sh PYTHON
set -eu
python=$1
home=$(pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip --disable-pip-version-check install --quiet build
"$python" -m build --outdir "$work/dist" "$home"
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
  (cd "$work/source" && "$work/fresh/bin/python" -m pytest -m "not slow" -x)
done
echo "both are fit to be released"
