#!/bin/sh
# Runs job/job.sh, on whichever machine. Around it: IMAGES (the guest's images, read-only) and BASE (the rest). Other jobs may run
# on a nested machine before and after it: it leaves modules, mounts and the clock as they were, or so that they do no harm. What
# a job may use:
#   $JOB      the job's own files         $WORK     its working directory, with space for disks
#   $RESULTS  what it puts here is handed back to the caller
#   $MACHINE  direct or nested: on whose machine it runs; on a nested one all its processes end with it
#   walvisor  on the search path; on a nested machine it and its libraries are in $BASE/program, with their loader
# and these functions:
#   progress TEXT                         replaces the progress line
#   guest_initrd OUT SCRIPT [PART...]     makes an initramfs whose guest runs SCRIPT; with these parts: fio, disks
#   start_guest NAME ARGUMENT...          starts `walvisor run ARGUMENT...`; its output is shown and kept in $RESULTS/NAME.log;
#                                         its input is $GUEST_INPUT, by default nothing
#   wait_guest NAME SECONDS               waits for its end: walvisor's exit status, or 124 after SECONDS (it is killed then), or
#                                         when a nested guest is silent for SILENT_SECONDS
#   wait_line NAME PATTERN SECONDS        waits until the output has a line that matches PATTERN: 0, or 1 if it never comes
#   kill_guest NAME                       kills it with SIGKILL, and waits for its end
#   run_guest NAME SECONDS ARGUMENT...    start_guest and wait_guest
#   guest_files NAME                      puts the files that the guest sent with send_file into $RESULTS
# A guest that does not show its first line within BOOT_SECONDS, or that ends without saying how its script did, ends the
# job with status 75: emulated virtualisation does that to guests at times. On a nested machine also one whose processor KVM
# could not run on, or that hung before its script's end. The caller tries again, a few times, and counts it.
#   spoken NAME                           sees to an end without a word; wait_guest does all of it by itself
#   unrunnable FILE                       whether FILE, what walvisor printed, says that KVM could not run a processor on,
#                                         and that on a nested machine
JOB=$BASE/job WORK=$BASE/files RESULTS=$BASE/results MACHINE=$(cat "$BASE/machine")
PATH=$BASE/bin:$PATH
BOOT_SECONDS=${BOOT_SECONDS:-90} SILENT_SECONDS=${SILENT_SECONDS:-90} GUEST_INPUT=${GUEST_INPUT:-/dev/null}
export IMAGES JOB WORK RESULTS MACHINE PATH
# KVM polls for an idle guest's next interrupt. In emulation that only takes the processor from others.
[ "$MACHINE" = nested ] && [ -e /sys/module/kvm/parameters/halt_poll_ns ] && echo 0 >/sys/module/kvm/parameters/halt_poll_ns

progress() { echo "progress: $*"; }

# Not the time of day, which a job may set.
uptime_seconds() {
    read -r uptime _ </proc/uptime
    echo "${uptime%.*}"
}

# silent NAME NOW: whether the guest has said nothing for SILENT_SECONDS of a wait that began with heard=. On a nested machine it
# has hung then: elsewhere it may compute.
silent() {
    [ "$MACHINE" = nested ] || return
    size=$(stat -c %s "$RESULTS/$1.log")
    if [ "$heard" != "$size" ]; then
        heard=$size heard_at=$2
    fi
    [ $(($2 - heard_at)) -ge "$SILENT_SECONDS" ]
}

guest_initrd() {
    initrd=$1 script=$2
    shift 2
    cat "$IMAGES/initramfs-base.cpio" >"$initrd"
    for part; do cat "$IMAGES/initramfs-$part.cpio" >>"$initrd"; done
    mkdir -p "$initrd.d"
    cat "$BASE/guest-functions.sh" "$script" >"$initrd.d/job"
    (cd "$initrd.d" && echo job | cpio -o -H newc 2>/dev/null) >>"$initrd"
}

start_guest() {
    name=$1
    shift
    rm -f "$WORK/$name.status" "$WORK/$name.pid" "$WORK/$name.pipe"
    : >"$RESULTS/$name.log"
    mkfifo "$WORK/$name.pipe"
    tee "$RESULTS/$name.log" <"$WORK/$name.pipe" &
    echo $! >"$WORK/$name.tee"
    {
        # The inner shell becomes walvisor: its process id is what kill_guest needs.
        sh -c 'echo $$ >"$0"; exec walvisor run "$@"' "$WORK/$name.pid" "$@" <"$GUEST_INPUT"
        echo $? >"$WORK/$name.new"
        mv "$WORK/$name.new" "$WORK/$name.status"
    } >"$WORK/$name.pipe" 2>&1 &
    wait_line "$name" 'guest: ready' "$BOOT_SECONDS" && return 0
    [ -f "$WORK/$name.status" ] && return 0
    kill_guest "$name"
    echo "job: guest $name did not boot within $BOOT_SECONDS s"
    exit 75
}

wait_guest() {
    began=$(uptime_seconds) heard=
    while ! [ -f "$WORK/$1.status" ]; do
        now=$(uptime_seconds)
        if [ $((now - began)) -ge "$2" ] || silent "$1" "$now"; then
            echo "job: guest $1 did not end within $((now - began)) s"
            kill_guest "$1"
            # Its processor may be stuck, which no watchdog notices with interrupts off.
            [ "$MACHINE" = nested ] && spoken "$1"
            return 124
        fi
        sleep 0.2
    done
    # tee may still hold the last lines.
    wait "$(cat "$WORK/$1.tee")"
    if [ "$(cat "$WORK/$1.status")" = 0 ] || unrunnable "$RESULTS/$1.log"; then spoken "$1"; fi
    return "$(cat "$WORK/$1.status")"
}

spoken() {
    grep -q 'guest: job exit' "$RESULTS/$1.log" && return
    echo "job: guest $1 ended without a word"
    exit 75
}

# What walvisor itself does wrong on a vCPU's thread is told in other words.
unrunnable() {
    [ "$MACHINE" = nested ] &&
        grep -q 'walvisor: .*vCPU [0-9]*: \(KVM internal error\|KVM cannot emulate\|the processor refused\|triple fault\)' "$1"
}

wait_line() {
    began_line=$(uptime_seconds) heard=
    until grep -q "$2" "$RESULTS/$1.log"; do
        now=$(uptime_seconds)
        [ $((now - began_line)) -lt "$3" ] || return 1
        ! silent "$1" "$now" || return 1
        if [ -f "$WORK/$1.status" ]; then
            sleep 0.2
            grep -q "$2" "$RESULTS/$1.log"
            return
        fi
        sleep 0.2
    done
}

kill_guest() {
    kill -KILL "$(cat "$WORK/$1.pid")"
    wait "$(cat "$WORK/$1.tee")"
    # Its last line may have been cut off: what follows begins a new one.
    echo
}

run_guest() {
    run_name=$1 run_seconds=$2
    shift 2
    start_guest "$run_name" "$@"
    wait_guest "$run_name" "$run_seconds"
}

guest_files() {
    : >"$WORK/files"
    tr -d '\r' <"$RESULTS/$1.log" |
        awk -v directory="$WORK" '
            /^guest: file / { out = directory "/" $3 ".b64"; printf "" >out; print $3 >>(directory "/files"); next }
            /^guest: end of file/ { out = ""; next }
            out != "" { print >out }'
    while read -r file; do
        base64 -d "$WORK/$file.b64" | gunzip >"$RESULTS/$file" || return 1
    done <"$WORK/files"
}

cd "$WORK" || exit 70
. "$JOB/job.sh"
