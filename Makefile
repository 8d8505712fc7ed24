# Everything from a fresh clone on Debian, set-up included. Needs Rust (cargo) and, to install packages, root.

CARGO ?= cargo
# For building: a linker. The rest is installed by what needs it, when it needs it.
PACKAGES = gcc libc6-dev
# No questions from apt, and no colours in logs.
SHELL = bash
export DEBIAN_FRONTEND = noninteractive

.PHONY: demo test setup format lint doc check

## demo: the embedded guest, then a Debian guest that runs fio on two disks on one write-ahead log, and a table
demo: setup
	$(CARGO) build --release --package walvisor --package walvisor-guest-images
	WALVISOR=target/release/walvisor target/release/walvisor-guest-images demo

## test: formatting, lints, documentation, and every test; prints how many were skipped, and why
test: setup format lint doc check

setup:
	@command -v $(CARGO) >/dev/null || { echo 'cargo is missing: install Rust 1.95 or newer' >&2; exit 1; }
	@command -v cc >/dev/null || { echo 'installing with apt-get: $(PACKAGES)'; \
	  apt-get -q install -y --no-install-recommends $(PACKAGES) || \
	  { apt-get -q update && apt-get -q install -y --no-install-recommends $(PACKAGES); }; }

# The embedded guest is a workspace of its own.
GUEST = guest-images/guest

format:
	$(CARGO) fmt --all --check
	cd $(GUEST) && $(CARGO) fmt --check

lint:
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	$(CARGO) clippy --package walvisor-storage --all-targets --features shuttle --locked -- -D warnings
	cd $(GUEST) && $(CARGO) clippy --all-targets --locked -- -D warnings

doc:
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --workspace --no-deps --locked --quiet

# The output of passed tests is needed to count those that could not run here.
check:
	@mkdir -p target
	@set -o pipefail; status=0; \
	{ $(CARGO) test --workspace --locked --no-fail-fast -- --show-output && \
	  $(CARGO) test --package walvisor-storage --lib --features shuttle --locked interleavings -- --show-output && \
	  cd $(GUEST) && $(CARGO) test --locked -- --show-output; } 2>&1 | tee target/test.log || status=1; \
	grep -o 'skipped: .*' target/test.log | sort | uniq -c; \
	echo "tests: $$(grep -c '^test .* ok$$' target/test.log) ok, of which" \
	  "$$(grep -c 'skipped: ' target/test.log) could not run here (skipped)"; \
	exit $$status
