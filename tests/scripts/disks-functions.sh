# Functions for the guest's scripts. Programs that busybox has too are called by their paths: its shell prefers its own.

# Prints the name of the disk with the serial number $1.
device() {
    for disk in /sys/block/vd*; do
        [ "$(cat "$disk/serial")" = "$1" ] && echo "${disk##*/}" && return
    done
    echo "guest: no disk $1" >&2
    return 1
}

# Reports to the job outside that step $1 is reached. Returns when the job has answered by growing the disk `step`.
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

# Reads $3 MiB of $1 from MiB $2 on with O_DIRECT, and prints the SHA-256.
direct_sum() { dd if="$1" bs=1M skip="$2" count="$3" iflag=direct 2>/dev/null | sha256sum | cut -d' ' -f1; }
file_sum() { sha256sum <"$1" | cut -d' ' -f1; }

# Makes a file $1 of $2 KiB, and prints its sum once the file is durable.
keep() {
    dd if=/dev/urandom of="$1" bs=1024 count="$2" conv=fsync 2>/dev/null || exit 1
    echo "guest: kept $1 $(file_sum "$1")"
}
