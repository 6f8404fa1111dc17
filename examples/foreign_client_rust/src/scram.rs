//! SCRAM-SHA-256 (RFC 5802, RFC 7677) without channel binding: the client's messages, and the check of the server's.

use crate::wire::Result;
use ring::{digest, hmac, pbkdf2};
use std::num::NonZeroU32;

/// The iterations that RFC 7677 requires, and a limit on the work for a server that is not trusted yet.
const ITERATIONS: std::ops::RangeInclusive<u32> = 4_096..=100_000;

pub struct Scram<'a> {
    password: &'a str,
    nonce: String,
    first_bare: String,
    /// The server key and the messages that its signature covers, after `final_message`.
    expected: Option<(hmac::Key, String)>,
}

impl<'a> Scram<'a> {
    /// `nonce` is text without a comma that was never used before.
    pub fn new(user: &str, password: &'a str, nonce: String) -> Result<Self> {
        // SASLprep leaves printable ASCII as it is. A name in another normalisation would be another user.
        if ![user, password].iter().all(|text| text.bytes().all(|byte| (0x20..0x7f).contains(&byte))) {
            return Err("this client logs in with printable ASCII only (it has no SASLprep)".into());
        }
        let first_bare = format!("n={},r={nonce}", user.replace('=', "=3D").replace(',', "=2C"));
        Ok(Scram { password, nonce, first_bare, expected: None })
    }

    pub fn first_message(&self) -> String {
        format!("n,,{}", self.first_bare)
    }

    /// Return the proof of the password for the server's first message.
    pub fn final_message(&mut self, server_first: &[u8]) -> Result<String> {
        let server_first = std::str::from_utf8(server_first).map_err(|error| error.to_string())?;
        let parts: Vec<&str> = server_first.split(',').collect();
        let [nonce, salt, iterations, ..] = parts[..] else {
            return Err(format!("SCRAM: {server_first:?} is no first message of a server"));
        };
        let nonce = value(nonce, "r=")?;
        if !nonce.starts_with(&self.nonce) || nonce.len() == self.nonce.len() {
            return Err("SCRAM: the server's nonce does not extend the client's".into());
        }
        let salt = decode(value(salt, "s=")?)?;
        let iterations: u32 = value(iterations, "i=")?.parse().map_err(|_| "SCRAM: no number of iterations")?;
        if !ITERATIONS.contains(&iterations) {
            return Err(format!("SCRAM: {iterations} iterations, not one of {ITERATIONS:?}"));
        }
        let mut salted = [0; digest::SHA256_OUTPUT_LEN];
        let count = NonZeroU32::new(iterations).expect("in the range");
        pbkdf2::derive(pbkdf2::PBKDF2_HMAC_SHA256, count, &salt, self.password.as_bytes(), &mut salted);
        let salted = hmac::Key::new(hmac::HMAC_SHA256, &salted);
        let client_key = hmac::sign(&salted, b"Client Key");
        let stored_key = digest::digest(&digest::SHA256, client_key.as_ref());
        let without_proof = format!("c=biws,r={nonce}"); // biws: n,, in base64
        let signed = format!("{},{server_first},{without_proof}", self.first_bare);
        let signature = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, stored_key.as_ref()), signed.as_bytes());
        let proof: Vec<u8> = client_key.as_ref().iter().zip(signature.as_ref()).map(|(a, b)| a ^ b).collect();
        let server_key = hmac::sign(&salted, b"Server Key");
        self.expected = Some((hmac::Key::new(hmac::HMAC_SHA256, server_key.as_ref()), signed));
        Ok(format!("{without_proof},p={}", encode(&proof)))
    }

    /// Check, in constant time, that the server knows the password, too.
    pub fn check(&self, server_final: &[u8]) -> Result<()> {
        let server_final = std::str::from_utf8(server_final).map_err(|error| error.to_string())?;
        let (key, signed) = self.expected.as_ref().ok_or("SCRAM: the server skipped a step")?;
        let signature = decode(value(server_final, "v=")?)?;
        hmac::verify(key, signed.as_bytes(), &signature)
            .map_err(|_| "SCRAM: the server does not prove that it knows the password".into())
    }
}

fn value<'a>(part: &'a str, name: &str) -> Result<&'a str> {
    part.strip_prefix(name).ok_or(format!("SCRAM: {part:?}, where {name} was expected"))
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

pub fn encode(data: &[u8]) -> String {
    let mut text = String::new();
    for three in data.chunks(3) {
        let bits = three.iter().fold(0, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        for place in 0..4 {
            match place <= three.len() {
                true => text.push(ALPHABET[(bits >> (18 - 6 * place) & 63) as usize] as char),
                false => text.push('='),
            }
        }
    }
    text
}

fn decode(text: &str) -> Result<Vec<u8>> {
    let bare = text.trim_end_matches('=');
    if text.len() % 4 != 0 || text.len() - bare.len() > 2 {
        return Err(format!("SCRAM: {text:?} is not base64"));
    }
    let (mut data, mut bits, mut count) = (Vec::new(), 0u32, 0);
    for byte in bare.bytes() {
        let digit = ALPHABET.iter().position(|each| *each == byte).ok_or(format!("SCRAM: {text:?} is not base64"))?;
        bits = bits << 6 | digit as u32;
        count += 6;
        if count >= 8 {
            count -= 8;
            data.push((bits >> count) as u8);
        }
    }
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONCE: &str = "rOprNGfwEbeRWgbNEkqO";
    const FIRST: &str = "r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096";
    const FINAL: &str = "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=";

    fn login() -> Scram<'static> {
        Scram::new("user", "pencil", NONCE.into()).unwrap()
    }

    #[test]
    fn the_example_of_rfc_7677() {
        let mut login = login();
        assert_eq!(login.first_message(), format!("n,,n=user,r={NONCE}"));
        let proof = "c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=";
        assert_eq!(login.final_message(FIRST.as_bytes()).unwrap(), proof);
        login.check(FINAL.as_bytes()).unwrap();
    }

    #[test]
    fn a_server_that_does_not_know_the_password_is_refused() {
        let mut other = Scram::new("user", "pen", NONCE.into()).unwrap();
        other.final_message(FIRST.as_bytes()).unwrap();
        assert!(other.check(FINAL.as_bytes()).unwrap_err().contains("does not prove"));
        assert!(login().check(FINAL.as_bytes()).unwrap_err().contains("skipped a step"));
        assert!(login().check(b"e=other-error").is_err());
    }

    #[test]
    fn first_messages_that_are_no_answer_are_refused() {
        for (message, reason) in [
            (FIRST.replace("rOpr", "xOpr"), "nonce"),
            (format!("r={NONCE},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"), "nonce"),
            (FIRST.replace("i=4096", "i=4095"), "iterations"),
            (FIRST.replace("i=4096", "i=4000000000"), "iterations"),
            (FIRST.replace("s=W22Z", "s=!22Z"), "base64"),
            (format!("m=extension,{FIRST}"), "expected"),
            ("r=x".into(), "no first message"),
        ] {
            let refusal = login().final_message(message.as_bytes()).unwrap_err();
            assert!(refusal.contains(reason), "{message}: {refusal}");
        }
    }

    #[test]
    fn names_are_escaped_and_other_text_is_refused() {
        let login = Scram::new("a=b,c", "p", "r".into()).unwrap();
        assert_eq!(login.first_message(), "n,,n=a=3Db=2Cc,r=r");
        assert!(Scram::new("ü", "p", "r".into()).is_err());
    }

    #[test]
    fn base64_there_and_back() {
        for data in [&b""[..], b"f", b"fo", b"foo", b"\xff\x00\xfe\x01"] {
            assert_eq!(decode(&encode(data)).unwrap(), data);
        }
        assert_eq!(encode(b"fo"), "Zm8=");
        assert!(decode("Zm8").is_err() && decode("====").is_err());
    }
}
