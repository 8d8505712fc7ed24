# Boots the disk that a nested machine has as /dev/vdc: its records are in a log outside. The console is the terminal.
GUEST_INPUT=/dev/console
start_guest boot --kernel "$IMAGES/vmlinux" --initrd "$IMAGES/initramfs-base.cpio" --cpus "$GUEST_CPUS" \
    --memory "$GUEST_MEMORY" --cmdline "$GUEST_CMDLINE" --disk path=/dev/vdc,backend=raw,transport=pci
until [ -f "$WORK/boot.status" ]; do sleep 0.2; done
wait "$(cat "$WORK/boot.tee")"
exit "$(cat "$WORK/boot.status")"
