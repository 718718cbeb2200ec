# Two commands set up everything: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-pure faults lint clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[test]'
	touch $@

demo: $(VENV)/.ready  ## the main job on this machine's CPU: real vLLM, real Ray, real Parquet
	$(BIN)/farm matrix configs/matrix/smoke-cpu.yaml

test: $(VENV)/.ready  ## everything that needs no GPU; real-vLLM tests use the cached pin
	$(BIN)/python -m pytest -m "not gpu and not faults"

faults: $(VENV)/.ready  ## kills, signals, full disks, dead nodes: each injected for real
	$(BIN)/python -m pytest -m faults tests/faults

# The pure cores: no process, no server, no Ray, no vLLM.
PURE := estimate hostmemory tiers agreement scheduler stats metrics bootlog evidence plan patchfile outcomes graft yamlfile cards campaign dep3 unidiff outcome nearest
test-pure: $(VENV)/.ready  ## the pure cores alone: under 5 s
	$(BIN)/python -m pytest -m "not slow" $(PURE:%=tests/test_%.py)

lint: $(VENV)/.ready
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) build *.egg-info
