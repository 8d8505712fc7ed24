# Grows two disks under a running guest, one on each transport, and reads the data that the guest wrote in the new
# ranges.
for transport in mmio pci; do
    walvisor disk create $transport.img --size 32M || exit
done
guest_initrd initrd "$JOB/guest.sh"
start_guest guest --kernel "$IMAGES/vmlinux" --initrd initrd --cpus 1 --memory 512M --control ctl \
    --cmdline 'console=ttyS0 quiet panic=-1 reboot=t' \
    --disk path=mmio.img,transport=mmio,serial=mmio --disk path=pci.img,transport=pci,serial=pci
wait_line guest 'guest: sizes 65536 65536' 60 || { spoken guest; exit 1; }
walvisor ctl ctl pause && walvisor ctl ctl resize --disk mmio --size 48M && walvisor ctl ctl resume
echo "job: mmio: status $?"
walvisor ctl ctl resize --disk pci --size 64M
echo "job: pci: status $?"
wait_guest guest 120
echo "job: guest ended with status $?"
for transport in mmio pci; do
    walvisor disk check $transport.img
    echo "job: check of $transport.img: status $?"
    echo "job: end of $transport.img: $(tail -c 1048576 $transport.img | tr -d 'W' | wc -c) bytes are wrong"
done
