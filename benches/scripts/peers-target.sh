# Both handlers on one kernel, in user-mode Linux over the files of this machine: the disks "walvisor" (RAM) and
# "tcmu-runner" (its qcow handler over an image in memory, the most similar one among the handlers that Debian has).
# tcmu-runner looks for its kernel modules in the directory of an ordinary kernel of the machine.
mkdir /run/lib /run/own
mount --bind /usr/lib /run/lib
ln -s /run/lib/* /run/own/
ln -sfn /run/lib/uml/modules /run/own/modules
mount --bind /run/own /usr/lib
mkdir -p /run/dbus /var/target/pr log /dev/shm
mount -t tmpfs memory /dev/shm
mount -t configfs configfs /sys/kernel/config
dbus-daemon --system --fork
tcmu-runner --tcmu-log-dir "$PWD/log" >runner.log 2>&1 &
sleep 2
qemu-img create -q -f qcow2 -o preallocation=full /dev/shm/disk.qcow2 64M
core=/sys/kernel/config/target/core/user_7/runner
loop=/sys/kernel/config/target/loopback/naa.5001405000000777/tpgt_1
mkdir -p $core
echo dev_config=qcow//dev/shm/disk.qcow2 >$core/control
echo dev_size=67108864,hw_block_size=512 >$core/control
echo 1 >$core/enable || { cat runner.log log/*; }
mkdir -p $loop
echo naa.5001405000000778 >$loop/nexus
mkdir $loop/lun/lun_0
ln -s $core $loop/lun/lun_0/runner
until runner=$(ls /sys/block | grep '^sd'); do sleep 0.2; done
"$WALVISOR" serve tcmu --disk backend=ram,size=64M,name=memory >served 2>daemon.log &
until [ -s served ]; do sleep 0.2; done
walvisor=$(sed -n 's|.* at /dev/\(sd[a-z]*\) .*|\1|p' served)
for disk in $runner $walvisor; do dd if=/dev/zero of=/dev/$disk bs=1M count=64 oflag=direct 2>/dev/null; done
DISKS="0=$walvisor 1=$runner"
