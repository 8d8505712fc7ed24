# What the scripts of `walvisor serve tcmu` share, in user-mode Linux: they run in a directory of the machine;
# $WALVISOR is the program, and the kernel's modules are below $PLACE.
walvisor() { "$WALVISOR" "$@"; }
config=/sys/kernel/config
load() { for module; do modprobe -d "$PLACE" "$module"; done; }
say() { echo "guest: $*"; }
# Runs a command that must fail, and prints its status and its message.
fails() {
    "$@" >out 2>err
    say "status $?: $(sed "s/process $daemon:/the daemon:/; s/: as root run .*/: as root run .../" err)"
}

# Starts the daemon `$1` with the rest as its arguments, and waits for all of its disks.
serve() {
    name=$1
    shift
    : >"$name.served"
    "$WALVISOR" serve tcmu "$@" --metrics "$name.prom" >"$name.served" 2>"$name.log" &
    daemon=$!
    disks=$(echo "$*" | grep -o -e '--disk ' | wc -l)
    until [ "$(wc -l <"$name.served")" = "$disks" ]; do
        kill -0 $daemon 2>/dev/null || { cat "$name.log"; exit 1; }
        sleep 0.2
    done
}
disk_of() { sed -n "s|^serving $2: .* at /dev/\([a-z]*\) .*|\1|p" "$1.served"; }
stop() {
    kill -TERM $daemon
    wait $daemon
    say "daemon: status $?"
    cat "$1.log"
}
sum() { sha256sum <"$1" | cut -d' ' -f1; }
