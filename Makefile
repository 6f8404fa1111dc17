# The daily commands. Each sets .venv up if necessary.
PYTHON := .venv/bin/python
.PHONY: check test pandas bench docs readme coverage walks sim mutants capabilities faults upgrade damage fuzz compose-test compose-spark-test spark-faults spark-memory spark-deployments

check: ; @bin/setup all dev test
	@$(PYTHON) -m ruff format --check -q . && $(PYTHON) -m ruff check -q . && $(PYTHON) -m mypy && .venv/bin/lint-imports

test: ; @bin/test

bench: ; @bin/setup all dev test && $(PYTHON) -m benchmarks

# The tests of data frames, with an environment of their own: where pandas is installed, pyarrow loads it everywhere.
pandas: ; @KAFKALITE_VENV=.venv-pandas bin/setup pandas test && .venv-pandas/bin/python -m pytest -q -rs tests/client/test_table.py tests/client/test_arrow.py

docs: ; @bin/setup all dev test && $(PYTHON) -m pytest -q tests/test_docs.py

# The README, typed from top to bottom into a fresh clone of the last commit: with Java, and without.
readme: ; @bin/setup all dev test && $(PYTHON) -m pytest -rs -m deployment -o faulthandler_timeout=0 tests/test_readme.py

# Whole clusters in virtual time, from seeds: make sim SEEDS=1000 START=1. A failure prints the command that replays it.
SEEDS := 300
START := 1
JOBS := 2
sim: ; @bin/setup all dev test && $(PYTHON) -m proof.sim --seeds $(SEEDS) --start $(START) --jobs $(JOBS)

# Activates one mutant at a time, and expects each to be found.
mutants: ; @bin/setup all dev test && $(PYTHON) -m proof.mutants --jobs $(JOBS) --at-least 60

# Breaks rows of docs/capabilities.md, and expects their tests to fail: make capabilities CAPABILITIES='--sample 20'
CAPABILITIES :=
capabilities: ; @bin/setup all dev test && $(PYTHON) -m proof.capabilities --jobs $(JOBS) $(CAPABILITIES)

# Real processes, killed, paused and cut off under load: make faults ROUNDS=50 FAULTS='--fault kill-all'
# Brokers that join and leave while nodes are killed: make faults ROUNDS=5 FAULTS='--fault move'
# The same with exactly-once jobs: make faults FAULTS=--transactions
ROUNDS := 20
FAULTS :=
faults: ; @bin/setup all dev test && $(PYTHON) -m proof.processes.faults --rounds $(ROUNDS) $(FAULTS)

# Three nodes of a previous version (default: the newest tag v*) are upgraded, rolled back and upgraded under load:
# make upgrade ROUNDS=10 PREVIOUS=<git revision>
PREVIOUS :=
upgrade: ; @bin/setup all dev test && $(PYTHON) -m proof.processes.upgrade --rounds $(ROUNDS) $(PREVIOUS:%=--previous %)

# Copies damaged while nodes are down, on clusters and on nodes without peers: make damage CASES=40 DAMAGE='--seed 7'
CASES := 300
DAMAGE :=
LONE :=
damage: ; @bin/setup all dev test && $(PYTHON) -m proof.processes.damage --self-test \
	&& $(PYTHON) -m proof.processes.damage --cases $(CASES) $(DAMAGE) && $(PYTHON) -m proof.processes.lone_damage $(LONE)

# Mutated requests of all APIs, and logins, at a real broker: make fuzz MINUTES=1 FUZZ='--start 4711'
MINUTES := 10
FUZZ :=
fuzz: ; @bin/setup all dev test && $(PYTHON) -m proof.processes.fuzz --minutes $(MINUTES) $(FUZZ)

# A Spark query killed at every named point, round after round: make spark-faults ROUNDS=50 FAULTS='--seed 7'
# These need Java 17 or newer, and keep a cache for quick starts of Spark in .venv.
SPARK := KAFKALITE_SPARK_CACHE=$${KAFKALITE_SPARK_CACHE:-$(CURDIR)/.venv/spark-cache} $(PYTHON)
spark-faults: ; @bin/setup all dev test && $(SPARK) -m proof.spark.faults --rounds $(ROUNDS) $(FAULTS)

# The same copy under local[2], a local cluster and a standalone master with two workers, and their memory.
spark-deployments: ; @bin/setup all dev test && $(PYTHON) -m pytest -rs -m deployment tests/spark

# The memory of Spark's Python workers while MEGABYTES are copied from source to sink.
MEGABYTES := 1000
spark-memory: ; @bin/setup all dev test && $(SPARK) -m proof.spark.memory --megabytes $(MEGABYTES)

# The real docker-compose.yml, whose image takes minutes to build; skipped without a docker engine, docker-compose and debootstrap.
compose-test: ; @bin/setup all dev test && $(PYTHON) -m pytest -rs -m deployment -o faulthandler_timeout=900 tests/deployment/test_compose.py

# Its profile spark. The first run makes a base image with Java and Spark, which takes minutes and 2 GB.
compose-spark-test: ; @bin/setup all dev test && $(PYTHON) -m pytest -rs -m deployment -o faulthandler_timeout=1800 tests/deployment/test_compose_spark.py

# Options of pytest that leave out what ``make coverage`` runs.
others: ; @echo $(COVERAGE_TESTS:%=--ignore=%)

# The files that each kind of request passes, by call stack.
walks: ; @bin/setup all dev test && $(PYTHON) -m proof.walks

# Branch coverage of the pure modules, which proof/pure.py reads from setup.cfg.
COVERAGE_TESTS := tests/vocabulary tests/protocol tests/records tests/metadata tests/groups tests/transactions tests/replication tests/storage tests/client tests/sparkbridge tests/raft tests/broker/test_disk_work.py tests/broker/test_fetch_sessions.py
coverage: ; @bin/setup all dev test && $(PYTHON) -m coverage erase && $(PYTHON) -m coverage run -m pytest -q -n $(JOBS) --deselect tests/storage/test_power_loss.py --deselect tests/storage/test_damage.py $(COVERAGE_TESTS)
	@$(PYTHON) -m coverage combine -q
	@$(PYTHON) -m coverage report --include="$$($(PYTHON) -m proof.pure)" --fail-under=95
