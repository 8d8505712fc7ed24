# Runs fio, and prints the results of fio and the counters in lines that begin with `measure: `, which linux/reader.rs reads.
# It comes before each script, after lines that set
#   $LOOPS  DEPTH:QUEUES ...   $JOBS  BACKEND:JOB ...   $SCHEDULERS   $ROUNDS   $BLOCK   $REQUESTS of a job in all, or its $SECONDS_EACH
# and the script defines ask: it makes the process outside report its counters, if a disk is served from there.

# cpu_ns PID: processor time of all its threads except vCPUs.
cpu_ns() {
    grep -L '^vcpu' /proc/"$1"/task/*/comm | sed 's/comm$/schedstat/' | xargs cat | awk '{ sum += $1 } END { printf "%.0f", sum }'
}

# Processor time of the whole machine, without idle and I/O wait time.
machine_cpu_ns() { awk '$1 == "cpu" { printf "%.0f", ($2 + $3 + $4 + $7 + $8) * 1e7 }' /proc/stat; }

# tell PLACE PID [SOCKET]: prints the current counters.
tell() {
    stats='{}'
    [ -z "$3" ] || stats=$(walvisor ctl "$3" stats --json | tr -d '\n')
    echo "measure: counters $1 {\"cpu_ns\":$(cpu_ns "$2"),\"machine_cpu_ns\":$(machine_cpu_ns),\"stats\":$stats}"
}

counters() {
    [ -z "$daemon" ] || tell daemon "$(cat "$daemon.pid")" "$(ls "$daemon.ctl" 2>/dev/null)"
    [ -z "$monitor$ALWAYS_ASK" ] || ask
}

# measure PATH DEVICE DISK MONITOR DAEMON: one job of $backend, $job, $depth, $queues, $scheduler. DISK is the disk's
# name in the process that serves it. MONITOR is not empty if that process is outside. DAEMON is the name of the
# server here, if there is one.
measure() {
    path=$1 device=$2 disk=$3 monitor=$4 daemon=$5 sync='' kind=${job%+fsync}
    [ "$kind" = "$job" ] || sync=--fdatasync=1
    case $REQUESTS in
    '') amount="--time_based --runtime=$SECONDS_EACH" ;;
    *) amount=--number_ios=$((REQUESTS / queues)) ;;
    esac
    echo "$scheduler" >/sys/block/"$device"/queue/scheduler 2>/dev/null
    in_force=$(sed 's/.*\[\(.*\)\].*/\1/' /sys/block/"$device"/queue/scheduler)
    # Sequential threads must not read the data that the thread before them has just read.
    case $kind in read | write) amount="$amount --offset_increment=1M" ;; esac
    echo "measure: job {\"path\":\"$path\",\"backend\":\"$backend\",\"job\":\"$job\",\"iodepth\":$depth,\"queues\":$queues,\"disk\":\"$disk\"," \
        "\"scheduler\":\"$in_force\",\"cache\":\"$(cat /sys/block/"$device"/queue/write_cache)\"}"
    counters
    fio --name=load --filename=/dev/"$device" --rw="$kind" --bs="$BLOCK" --direct=1 --ioengine=libaio --iodepth="$depth" \
        --numjobs="$queues" --thread --group_reporting --norandommap --percentile_list=50:99:99.9 --output-format=json \
        --eta=never $sync $amount >fio.json 2>fio.log || { echo "measure: failed $path: fio: $(tail -n 1 fio.log)"; return; }
    counters
    awk '
        /^ *"(read|write|sync)" : \{/ { kind = $1; gsub(/[^a-z]/, "", kind); where = kind == "sync" ? "" : "clat" }
        /^ *"trim" : \{/ { kind = "" }
        /^ *"(slat|lat)_ns" : \{/ { where = kind == "sync" ? "clat" : "" }
        /^ *"clat_ns" : \{/ { where = "clat" }
        kind == "" { next }
        { value = $3; sub(/,$/, "", value) }
        $1 == "\"iops\"" { iops[kind] = value }
        $1 == "\"bw_bytes\"" { bytes[kind] = value }
        where == "" { next }
        $1 == "\"N\"" { total[kind] = value }
        $1 == "\"50.000000\"" { half[kind] = value }
        $1 == "\"99.000000\"" { most[kind] = value }
        $1 == "\"99.900000\"" { nearly[kind] = value }
        END {
            for (kind in total)
                if (total[kind] > 0)
                    print "measure: fio", kind, "{\"requests\":" total[kind] ",\"iops\":" iops[kind] + 0 ",\"bytes_per_s\":" bytes[kind] + 0 \
                        ",\"p50\":" half[kind] + 0 ",\"p99\":" most[kind] + 0 ",\"p999\":" nearly[kind] + 0 "}"
        }' fio.json
    echo 'measure: end'
}

# each_job COMMAND: runs COMMAND for each measurement, with $backend, $job, $depth, $queues and $scheduler.
each_job() {
    for combination in $JOBS; do
        backend=${combination%%:*} job=${combination#*:}
        for loop in $LOOPS; do
            depth=${loop%%:*} queues=${loop#*:}
            for scheduler in $SCHEDULERS; do "$@"; done
        done
    done
}

missing() { echo "measure: missing $1|$2"; }

# serve NAME DOOR ARGUMENT...: starts a daemon here, with $NAME.pid and $NAME.ctl. Its output is in $NAME.served, one
# line per disk.
serve() {
    name=$1
    shift
    : >"$name.served"
    walvisor serve "$@" >"$name.served" 2>"$name.log" &
    echo $! >"$name.pid"
    wanted=$(echo "$*" | grep -o -e '--disk' | wc -l)
    until [ "$(wc -l <"$name.served")" = "$wanted" ]; do
        kill -0 "$(cat "$name.pid")" 2>/dev/null || { missing "serve $name" "$(tail -n 1 "$name.log")"; return 1; }
        sleep 0.1
    done
}

# The kernel's SCSI target and its NBD client on disks of `$SIZE`. Each disk has the name of its backend.
serve_tcmu() {
    walvisor disk create tcmu.img --size "$SIZE" >tcmu.log 2>&1 || { missing tcmu "$(tail -n 1 tcmu.log)"; return 1; }
    serve tcmu tcmu --control tcmu.ctl --disk "backend=ram,size=$SIZE,name=ram,serial=ram" \
        --disk path=tcmu.img,name=wal,serial=wal
}
serve_nbd() {
    command -v nbd-client >/dev/null || { missing nbd 'nbd-client is missing: install the package nbd-client'; return 1; }
    walvisor disk create nbd.img --size "$SIZE" >nbd.log 2>&1 || { missing nbd "$(tail -n 1 nbd.log)"; return 1; }
    serve nbd nbd --control nbd.ctl --disk "backend=ram,size=$SIZE,socket=$PWD/nbd.s,serial=ram" \
        --disk "path=nbd.img,socket=$PWD/nbd.s,serial=wal" || return
    # One connection per processor, as a virtio disk has one queue per processor.
    { nbd-client -unix "$PWD/nbd.s" /dev/nbd0 -N ram -C "$(nproc)" && nbd-client -unix "$PWD/nbd.s" /dev/nbd1 -N wal -C "$(nproc)"; } >nbd.log 2>&1 ||
        { missing nbd "$(tail -n 1 nbd.log)"; return 1; }
}
# Prepares the kernel of a machine with KVM for both. Only a `nested` machine may be changed for good, because it
# belongs to this run alone.
prepare_machine() {
    if [ "$MACHINE" = nested ]; then
        for part in fio scsi; do (cd / && cpio -idu <"$IMAGES/initramfs-$part.cpio" 2>/dev/null); done
        for module in configfs scsi_common scsi_mod target_core_mod uio target_core_user crc64 crc64_rocksoft_generic \
            crc64-rocksoft crc64_rocksoft crc-t10dif crct10dif_common crc_t10dif t10-pi t10_pi sd_mod tcm_loop; do
            insmod /modules/*-"$module".ko 2>/dev/null
        done
        mount -t configfs configfs /sys/kernel/config
    else
        modprobe -a target_core_user tcm_loop sd_mod nbd 2>/dev/null
    fi
    echo "measure: machine $MACHINE"
}
# Prepares user-mode Linux, which has its modules. $WALVISOR is the program, and $PLACE a directory of the machine for
# logs.
prepare_user_mode() {
    printf '#!/bin/sh\nexec "%s" "$@"\n' "$WALVISOR" >walvisor && chmod +x walvisor && PATH=$PWD:$PATH
    mkdir files && mount -t hostfs none files -o "$PLACE" && cd files || exit
    mount -t configfs configfs /sys/kernel/config
    echo 'measure: machine user-mode'
}
start_local() {
    tcmu='' nbd=''
    command -v fio >/dev/null || { missing 'tcmu and nbd' 'fio is missing: install the package fio'; return; }
    serve_tcmu && tcmu=1
    serve_nbd && nbd=1
}
# stop DAEMON...: stops those daemons that run.
stop() {
    [ -z "$nbd" ] || { nbd-client -d /dev/nbd0; nbd-client -d /dev/nbd1; } >/dev/null
    for door; do [ ! -e "$door.pid" ] || { kill -TERM "$(cat "$door.pid")"; wait "$(cat "$door.pid")"; }; done
}
# scsi_disk NAME DISK: prints the kernel's name for a disk of a daemon.
scsi_disk() { sed -n "s|^serving $2: .* at /dev/\([a-z]*\) .*|\1|p" "$1.served"; }
nbd_disk() { case $1 in ram) echo nbd0 ;; wal) echo nbd1 ;; esac; }
local_paths() {
    [ -z "$tcmu" ] || measure tcmu "$(scsi_disk tcmu "$backend")" "$backend" '' tcmu
    [ -z "$nbd" ] || measure nbd "$(nbd_disk "$backend")" "$backend" '' nbd
}
