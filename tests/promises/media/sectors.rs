//! A volume with logical sectors of 4 KiB. O_DIRECT needs whole sectors, but a guest may use
//! sectors of 512 bytes.

use std::os::unix::fs::FileExt;

use walvisor_storage::{Image, Operation, create_disk, default_log_dir};
use walvisor_tests::medium_fs::MediumFs;

use crate::{carry_out, open, options, write};

#[test]
fn sectors_of_512_bytes_are_had_on_sectors_of_4096() {
    let volume = match MediumFs::with_sectors("ext4", 4096) {
        Ok(volume) => volume,
        Err(why) => return println!("skipped: no volume with such sectors: {why}"),
    };
    let disk = volume.top().join("disk.img");
    let log = default_log_dir(&disk);
    create_disk(&disk, 1 << 20, &log, &options()).unwrap();
    for round in 1..=2 {
        let store = open(&disk, &log);
        let mut port = store.disks()[0].open_port().unwrap();
        let operations = vec![
            write(0, &[round; 4096]),
            write(17, &[round + 10; 512]),
            Operation::Flush,
            Operation::Discard {
                sector: 2,
                sectors: 3,
            },
            Operation::Flush,
        ];
        carry_out(&mut port, operations);
        drop(port);
        store.close().unwrap();
        let bytes = std::fs::read(&disk).unwrap();
        assert_eq!(bytes[..1024], [round; 1024]);
        assert_eq!(bytes[1024..2560], [0; 1536]);
        assert_eq!(bytes[2560..4096], [round; 1536]);
        assert_eq!(bytes[17 * 512..18 * 512], [round + 10; 512]);
    }
    // An image without a log works too. A sparse image without any data takes any read with
    // O_DIRECT.
    let raw = volume.top().join("raw.img");
    std::fs::File::create(&raw)
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    for _ in 0..2 {
        let image = Image::open(&raw, false).unwrap();
        image.file().write_all_at(&[7; 512], 512).unwrap();
        let mut read = [0; 512];
        image.file().read_exact_at(&mut read, 512).unwrap();
        assert_eq!(read, [7; 512]);
    }
}
