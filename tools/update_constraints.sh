#!/usr/bin/env bash
# Writes constraints/py311.txt and constraints/py312.txt: the newest releases that pyproject.toml
# allows for '.[test,dev,docs,inspect]'. .ci/run installs these versions. Needs uv (pip install uv),
# which reads metadata alone: nothing large is downloaded.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
for version in 3.11 3.12; do
    # The platform is that of CI, whoever runs this. No index URL is written.
    uv pip compile pyproject.toml --extra test --extra dev --extra docs --extra inspect --upgrade --quiet --no-annotate \
        --python-version "$version" --python-platform x86_64-manylinux_2_28 \
        --custom-compile-command tools/update_constraints.sh --output-file "constraints/py${version/./}.txt"
done
git diff --stat -- constraints
