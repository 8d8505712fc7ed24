# Builds versitygw, an S3 server, in the current directory, unless it is there. The Go of Debian 12 is too old for it, but fetches
# a newer one.
set -eu
export GOFLAGS=-modcacherw GOPATH="$PWD/go" GOCACHE="$PWD/cache" CGO_ENABLED=0
[ ! -x versitygw ] || exit 0
found=$(go mod download -json golang.org/toolchain@v0.0.1-go1.25.5.linux-amd64)
GOROOT=$(printf '%s\n' "$found" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
export GOROOT GOTOOLCHAIN=local GOBIN="$PWD/new"
chmod +x "$GOROOT"/bin/* "$GOROOT"/pkg/tool/*/*
"$GOROOT/bin/go" install -ldflags='-s -w' github.com/versity/versitygw/cmd/versitygw@v1.8.0
rm -rf go cache
mv new/versitygw .
