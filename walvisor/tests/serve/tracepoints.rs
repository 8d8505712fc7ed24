//! The program has the static tracepoints that `docs/tracing.md` lists.

use std::collections::BTreeMap;

/// The section with the notes of SystemTap in an ELF file of 64 bits.
fn notes(elf: &[u8]) -> &[u8] {
    let short = |at: usize| u16::from_le_bytes(elf[at..at + 2].try_into().unwrap()) as usize;
    let word = |at: usize| u32::from_le_bytes(elf[at..at + 4].try_into().unwrap()) as usize;
    let long = |at: usize| u64::from_le_bytes(elf[at..at + 8].try_into().unwrap()) as usize;
    // Section headers: where they are, how long each is, how many there are, and which names them.
    let (start, size, count, names) = (long(0x28), short(0x3a), short(0x3c), short(0x3e));
    let section = |index: usize| start + index * size;
    let named = |at: &usize| {
        let name = long(section(names) + 24) + word(*at);
        elf[name..].starts_with(b".note.stapsdt\0")
    };
    let found = (0..count).map(section).find(named).expect("a section");
    &elf[long(found + 24)..][..long(found + 32)]
}

/// The names of the provider's tracepoints, each with its number of arguments.
fn tracepoints(elf: &[u8], provider: &str) -> BTreeMap<String, usize> {
    // An ELF note: lengths of name and description, type 3, the name, the description. The
    // description is three addresses and three texts: provider, name, arguments.
    const OWNER: &[u8] = b"stapsdt\0";
    let elf = notes(elf);
    let number = |at: usize| u32::from_le_bytes(elf[at..at + 4].try_into().unwrap()) as usize;
    let owners = elf.windows(OWNER.len()).enumerate();
    let notes = owners.filter(|(at, owner)| {
        *owner == OWNER && *at >= 12 && number(at - 12) == OWNER.len() && number(at - 4) == 3
    });
    let mut found = BTreeMap::new();
    for (at, _) in notes {
        let description = &elf[at + OWNER.len()..][..number(at - 8)];
        let mut texts = description[24..].split(|byte| *byte == 0);
        let mut text = || String::from_utf8(texts.next().unwrap().to_vec()).unwrap();
        let (owner, name, arguments) = (text(), text(), text());
        if owner == provider {
            found.insert(name, arguments.split_whitespace().count());
        }
    }
    found
}

#[test]
fn the_program_has_the_documented_tracepoints() {
    let program = std::fs::read(env!("CARGO_BIN_EXE_walvisor")).unwrap();
    let found = tracepoints(&program, "walvisor");
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/tracing.md");
    let page = std::fs::read_to_string(page).unwrap();
    // Rows such as: | `submit` | when | `arg0` token, `arg1` kind |
    let documented: BTreeMap<String, usize> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(name, row)| (name.to_owned(), row.matches("`arg").count()))
        .collect();
    assert_eq!(found, documented);
    assert_eq!(found.len(), 7);
}
