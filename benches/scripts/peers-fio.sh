# fio on each of DISKS (number=device), in turns: JOBS (number:fio's rw:iodepth:fsync), ROUNDS rounds, TURN seconds each.
for disk in $DISKS; do echo "guest: cache ${disk%=*} $(cat "/sys/block/${disk#*=}/queue/write_cache")"; done
for round in $(seq "$ROUNDS"); do
    for job in $JOBS; do
        IFS=: read -r name rw depth fsync <<-END
		$job
		END
        for disk in $DISKS; do
            rates=$(fio --name=job --filename="/dev/${disk#*=}" --rw="$rw" --bs=4k --direct=1 --ioengine=libaio \
                --iodepth="$depth" --fsync="$fsync" --runtime="$TURN" --time_based --minimal | cut -d';' -f8,49 | tr ';' '+')
            echo "guest: rate ${disk%=*} $name $(($rates))"
        done
    done
done
