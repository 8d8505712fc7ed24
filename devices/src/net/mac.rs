//! Ethernet addresses.

use std::fmt;
use std::str::FromStr;

/// The address of an Ethernet device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MacAddress([u8; 6]);

/// The text is no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("give six bytes in hexadecimal, such as 02:00:00:00:00:01")]
pub struct ParseMacError;

impl MacAddress {
    /// The address of these bytes.
    pub fn new(bytes: [u8; 6]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub fn bytes(self) -> [u8; 6] {
        self.0
    }

    /// Whether it is the address of a group of devices, or of all.
    pub fn is_group(self) -> bool {
        self.0[0] & 1 != 0
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for MacAddress {
    type Err = ParseMacError;

    fn from_str(text: &str) -> Result<Self, ParseMacError> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().ok_or(ParseMacError)?;
            let is_byte = part.len() == 2 && part.bytes().all(|c| c.is_ascii_hexdigit());
            *byte = u8::from_str_radix(part, 16)
                .ok()
                .filter(|_| is_byte)
                .ok_or(ParseMacError)?;
        }
        parts
            .next()
            .is_none()
            .then_some(Self(bytes))
            .ok_or(ParseMacError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_six_bytes_in_hexadecimal() {
        let mac: MacAddress = "02:00:5E:10:00:ff".parse().unwrap();
        assert_eq!(mac.to_string(), "02:00:5e:10:00:ff");
        assert!(!mac.is_group());
        assert!(MacAddress::new([0xff; 6]).is_group());
        for wrong in [
            "",
            "02",
            "02:00:00:00:00",
            "02:00:00:00:00:00:00",
            "2:0:0:0:0:1",
            "+2:00:00:00:00:01",
            "0g:00:00:00:00:01",
            "02-00-00-00-00-01",
        ] {
            assert_eq!(wrong.parse::<MacAddress>(), Err(ParseMacError), "{wrong}");
        }
    }
}
