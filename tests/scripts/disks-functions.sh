# Before the guest's scripts on its disks. Programs that busybox has too are called by their paths: its shell takes its own.

# The disk with the serial number $1.
device() {
    for disk in /sys/block/vd*; do
        [ "$(cat "$disk/serial")" = "$1" ] && echo "${disk##*/}" && return
    done
    echo "guest: no disk $1" >&2
    return 1
}

# Tells the job outside that step $1 is reached, and goes on when that has made the disk `step` longer.
step() {
    before=$(cat "/sys/block/$STEP/size")
    echo "guest: at $1."
    for try in $(seq 1200); do
        [ "$(cat "/sys/block/$STEP/size")" != "$before" ] && return
        sleep 0.1
    done
    echo "guest: step $1 was not answered"
    exit 1
}

# Reads $1 past every cache, from MiB $2 on for $3 MiB, and gives the SHA-256.
direct_sum() { dd if="$1" bs=1M skip="$2" count="$3" iflag=direct 2>/dev/null | sha256sum | cut -d' ' -f1; }
file_sum() { sha256sum <"$1" | cut -d' ' -f1; }

# A file $1 of $2 KiB that is durable when its sum is told.
keep() {
    dd if=/dev/urandom of="$1" bs=1024 count="$2" conv=fsync 2>/dev/null || exit 1
    echo "guest: kept $1 $(file_sum "$1")"
}
