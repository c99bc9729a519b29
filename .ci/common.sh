# What .ci/run and .ci/nightly share; they source it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 JAX_PLATFORMS=cpu

stage=
began=0
# say STAGE: it begins, and the one before took so many seconds.
say() {
    [ -z "$stage" ] || printf '== %d s: %s\n' $((SECONDS - began)) "$stage"
    stage=$*
    began=$SECONDS
    printf '\n== %s\n' "$stage"
}

done_all() {
    say "Done, in $SECONDS s"
}

# Prints the path of a Python of this version that really runs (a pyenv shim may exist without a
# version behind it).
find_python() {
    local version=$1 candidate full
    if candidate=$(command -v "python$version") && "$candidate" -c '' 2>/dev/null; then
        echo "$candidate"
    elif command -v pyenv >/dev/null && full=$(pyenv versions --bare | grep -E "^${version//./\\.}\.[0-9]+$" | tail -n 1); then
        echo "$(pyenv prefix "$full")/bin/python"
    else
        return 1
    fi
}

# install py311 ARGUMENTS: pip installs them there at the versions of constraints/py311.txt. A pin
# never fails the run: where one cannot be had (an index may lag) or does not fit pyproject.toml,
# one line says so, and pip chooses as it does for users.
install() {
    local name=$1 pip="$work/$1/bin/pip" log="$work/$1.log"
    shift
    if [ -z "${NEWEST:-}" ]; then
        "$pip" install --constraint "constraints/$name.txt" "$@" >"$log" 2>&1 && return
        echo "constraints/$name.txt is not used: $(grep -m 1 '(constraint)' "$log" || grep -m 1 '^ERROR' "$log")"
    fi
    "$pip" install --quiet "$@"
}

# fetch_models py311: real weights, which some tests want; where they cannot be had, those tests say
# that they are skipped.
fetch_models() {
    say "Models"
    "$work/$1/bin/jaxpage" fetch smollm2 --quiet ||
        echo "No SmolLM2 here: what needs it is not tested"
}

# install_clients py311 PYTHON: programs that talk to servers, in an environment of their own. Where
# one cannot be had, its test says that it is skipped.
install_clients() {
    say "vllm-router, smg and lm-eval"
    "$2" -m venv "$work/clients-$1"
    for package in vllm-router smg 'lm-eval[api] transformers'; do
        # shellcheck disable=SC2086 # several words are several packages
        "$work/clients-$1/bin/pip" install --quiet $package ||
            echo "No $package here: what needs it is not tested"
    done
}

# install_agent_clients py311 PYTHON: what tests/test_agent_clients.py drives, each in an
# environment of its own below the directory that AGENT_CLIENTS then names, at the versions of
# constraints/agent-clients.txt. Where one cannot be had, its tests say that they are skipped.
install_agent_clients() {
    say "Clients of agents"
    export AGENT_CLIENTS="$work/agents-$1"
    local packages name
    for packages in litellm openai-agents 'pydantic-ai-slim[openai,anthropic]' 'langchain langchain-openai langchain-anthropic langchain-ollama' \
        'instructor anthropic' 'smolagents[openai]' \
        'llama-index-core llama-index-llms-openai-like llama-index-llms-anthropic llama-index-llms-ollama anthropic<1'; do
        name=${packages%%[ \[]*}
        "$2" -m venv "$AGENT_CLIENTS/$name"
        # shellcheck disable=SC2086 # several words are several packages
        "$AGENT_CLIENTS/$name/bin/pip" install --quiet --constraint constraints/agent-clients.txt $packages || {
            echo "No $packages here: what needs it is not tested"
            rm -rf "${AGENT_CLIENTS:?}/$name"
        }
    done
    mkdir -p "$AGENT_CLIENTS/node"
    cp tests/clients/package.json "$AGENT_CLIENTS/node"
    npm install --prefix "$AGENT_CLIENTS/node" --no-audit --no-fund --silent || {
        echo "No npm here, or no packages: clients for Node are not tested"
        rm -rf "${AGENT_CLIENTS:?}/node"
    }
}

# The page is tested in a browser; where none can be had, those tests say that they are skipped.
install_chromium() {
    if ! command -v chromium >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "Chromium"
        (timeout 300 apt-get update -qq && timeout 600 apt-get install -y -qq --no-install-recommends chromium) >/dev/null 2>&1 ||
            echo "No Chromium here: the page is not tested"
    fi
}
