#!/usr/bin/env bash
# Check the files that the tests cannot judge: workflows, forms, container files, chart, shell scripts. No network.
# What needs a program that is not installed (helm, docker compose) is named and left out.
set -euo pipefail
cd "$(dirname "$0")/.."

schema() { check-jsonschema --builtin-schema "vendor.$1" "${@:2}"; }
schema github-workflows .github/workflows/*.yml
schema github-actions .github/actions/*/action.yml
schema github-issue-config .github/ISSUE_TEMPLATE/config.yml
schema github-issue-forms .github/ISSUE_TEMPLATE/{bug,idea,method}.yml
schema dependabot .github/dependabot.yml
schema citation-file-format CITATION.cff
schema compose-spec deploy/compose.yaml deploy/device.yaml
yamllint --strict .github deploy conda mkdocs.yml .pre-commit-config.yaml .yamllint.yaml CITATION.cff
zizmor --offline --quiet .github
hadolint deploy/Dockerfile
shellcheck scripts/*.sh .ci/run
pre-commit validate-config

if command -v helm >/dev/null; then
  chart=(deploy/chart --set image.repository=registry.example/freshet --set image.tag=test --set host=fl.example.org)
  helm lint --strict "${chart[@]}"
  helm template trial "${chart[@]}" >/dev/null
else
  echo "the chart is not rendered: helm is not installed"
fi
if docker compose version >/dev/null 2>&1; then
  docker compose -f deploy/compose.yaml --profile init config --quiet
  NODE=0 docker compose -f deploy/device.yaml config --quiet
else
  echo "the compose files are not resolved: docker compose is not installed"
fi
