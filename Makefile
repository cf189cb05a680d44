# Everything a developer runs. Each target makes the environment it needs, from Python alone, and
# makes it again when pyproject.toml changes.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
# Python compiles what it imports; pip would compile all that there is, for a minute.
INSTALL := $(PY) -m pip install -qq --disable-pip-version-check --no-compile
# And it keeps that, or every process of the tests would compile all of JAX again.
unexport PYTHONDONTWRITEBYTECODE
# The versions that were tested, for pip: a release of tomorrow breaks nothing here.
versions = sed -n 's/^\([a-z0-9].*[^ ]\) \\$$/\1/p' $(1) > $(VENV)/versions

.PHONY: help quickstart test check lock proof bench docs plans clean

help:
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: $(VENV)/.core  ## train a small model on whatever is here, in about two minutes
	$(VENV)/bin/windlass train quickstart

test: $(VENV)/.dev  ## all tests, on 8 simulated devices
	$(PY) -m pytest -q -n auto --maxprocesses 8 --dist worksteal

check: $(VENV)/.dev  ## lint, format, types, licences and known vulnerabilities
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)
	$(PY) .ci/dependencies.py

# One version for every Python and machine; no address of the index that it was made with.
LOCK := uv pip compile -q pyproject.toml --universal --fork-strategy fewest --python-version 3.11 \
	--generate-hashes --no-emit-index-url --upgrade
lock:  ## requirements.lock and requirements-dev.lock, of the newest versions; needs uv
	$(LOCK) -o requirements.lock
	$(LOCK) --extra dev -c requirements.lock -o requirements-dev.lock

proof: $(VENV)/.dev  ## the long experiments behind the claims
	$(PY) proofs/run.py

bench: $(VENV)/.dev  ## steps, starts, data and checkpoints on this machine, beside others
	$(PY) benchmarks/all.py

docs: $(VENV)/.dev  ## references and the schema, from the source, and the site in site/
	$(PY) -m docs.write
	$(PY) -m zensical build --clean --strict

plans: $(VENV)/.dev  ## docs/recipes.md, from the plan of every recipe; takes minutes
	HF_HUB_OFFLINE=1 $(PY) -m docs.recipes

clean:
	rm -rf $(VENV) dist site

$(VENV)/.core: pyproject.toml
	@echo "installing windlass into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(call versions,requirements.lock)
	@$(INSTALL) -c $(VENV)/versions -e .
	@touch $@

# The parity tests compare with PyTorch, and with PEFT, which needs it. It has no wheel for every
# machine, and where it has none they compare with what was recorded of both. It is as large as all
# the rest, which is unpacked beside it.
$(VENV)/.dev: pyproject.toml
	@echo "installing windlass and what its tests need into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(call versions,requirements-dev.lock)
	@$(INSTALL) --no-warn-conflicts --no-deps torch==2.13.0 & torch=$$!; \
	$(INSTALL) --no-warn-conflicts -c $(VENV)/versions -e '.[dev]' || exit 1; \
	{ wait $$torch && $(INSTALL) torch==2.13.0 'peft>=0.18'; } || \
		echo "torch 2.13.0 cannot be installed here: parity is tested against a record"
	@touch $(VENV)/.core $@
