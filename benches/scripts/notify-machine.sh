# The paths of a machine with KVM: virtio-mmio and virtio-pci of a guest of `walvisor run`, with eventfds and without;
# TCMU inside that guest over its virtio-pci disk; TCMU and the NBD client of the machine's own kernel. The guest and
# the machine take turns: each waits on the guest's console for the other. The script's first part is load.sh.
SIZE=16M
CR=$(printf '\r')
prepare_machine
progress 'disks of the guest'
disks=''
for transport in mmio pci; do
    for way in on off; do
        name=$transport-$way
        walvisor disk create "$name.img" --size $SIZE || exit 1
        options="transport=$transport,ioeventfd=$way,queues=$CPUS"
        disks="$disks --disk backend=ram,size=$SIZE,$options,serial=$name-ram --disk path=$name.img,$options,serial=$name-wal"
    done
done
progress 'disks of the machine'
start_local

progress 'booting the guest'
sed -n '1,/^# end of settings/p' "$JOB/job.sh" >guest.job
cat "$JOB/load.sh" "$JOB/guest.sh" >>guest.job
guest_initrd initrd guest.job fio scsi
[ ! -d "$BASE/program" ] || (cd "$BASE" && find program | cpio -o -H newc 2>/dev/null) >>initrd
mkfifo in out
walvisor run --kernel "$IMAGES/vmlinux" --initrd initrd --cpus "$CPUS" --memory 1G --control monitor.ctl \
    --cmdline 'console=ttyS0 quiet panic=-1 reboot=t' $disks <in >out 2>&1 &
guest=$!
exec 3>in 4<out
# A guest that is silent for too long has hung. This ends the loop below.
: >alive
while sleep "$BOOT_SECONDS"; do
    [ -e alive ] || { kill -KILL $guest; break; }
    rm alive
done &
watchdog=$!
said=''
while IFS= read -r line <&4; do
    : >alive
    line=${line%"$CR"}
    case $line in
    *'measure: ask') tell monitor $guest monitor.ctl; echo go >&3 ;;
    *'measure: turn') each_job local_paths | while IFS= read -r line; do : >alive; echo "$line"; done; echo go >&3 ;;
    *'guest: job exit '*) said=${line##* }; echo "$line" ;;
    *) echo "$line" ;;
    esac
done
kill $watchdog
wait $guest
stop tcmu nbd
[ -n "$said" ] || exit 75
exit "$said"
