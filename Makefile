# Two commands set up everything: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-pure lint clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[test,lint]'
	touch $@

demo: $(VENV)/.ready  ## the main job on this machine's CPU: real vLLM, real Ray, real Parquet
	$(BIN)/farm matrix configs/matrix/smoke-cpu.yaml

test: $(VENV)/.ready  ## everything that needs no GPU; real-vLLM tests use the cached pin
	$(BIN)/python -m pytest -m "not gpu"

test-pure: $(VENV)/.ready  ## the pure cores alone: seconds
	$(BIN)/python -m pytest -m "not gpu and not vllm and not ray and not slow"

lint: $(VENV)/.ready
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) build *.egg-info
