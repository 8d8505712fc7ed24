# Boots the disks that a nested machine has as /dev/vdc and so on: their records are in a log outside. The console is the
# terminal. GUEST_NET: keys of a network device, which is bridged to this machine's network card.
GUEST_INPUT=/dev/console
set -- --kernel "$IMAGES/vmlinux" --initrd "$IMAGES/initramfs-base.cpio" --cpus "$GUEST_CPUS" \
    --memory "$GUEST_MEMORY" --cmdline "$GUEST_CMDLINE"
for letter in $(echo c d e f g h i j k l m n o p q r s t u v w x y z | cut -d' ' -f1-"$GUEST_DISKS"); do
    set -- "$@" --disk "path=/dev/vd$letter,backend=raw,transport=pci"
done
if [ -n "$GUEST_NET" ]; then
    brctl addbr bridge0
    brctl addif bridge0 eth0
    ip link set eth0 up
    ip link set bridge0 up
    # The device is there before the guest: it is made here, and goes on without it.
    tunctl -t tap0 >/dev/null
    brctl addif bridge0 tap0
    ip link set tap0 up
    set -- "$@" --net "tap=tap0,transport=pci$GUEST_NET"
fi
start_guest boot "$@"
until [ -f "$WORK/boot.status" ]; do sleep 0.2; done
wait "$(cat "$WORK/boot.tee")"
exit "$(cat "$WORK/boot.status")"
