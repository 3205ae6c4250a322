"""Texts of others without the secrets in them."""

import pytest

from slipstream.wire.redaction import without_secrets

LEAKS = [
    "SecretKey=S3CRET",
    "the key is wrong: SecretKey = S3CRET, region eu",
    "AWSSecretAccessKey: S3CRET",
    "aws_secret_access_key='S3CRET and more'",
    "AWS_SESSION_TOKEN=S3CRET",
    "x-amz-security-token: S3CRET",
    "token=S3CRET",
    "refresh_token%3DS3CRET",
    "Invalid token: S3CRET",
    "password=S3CRET",
    "password: S3CRET, retry",
    "PWD=S3CRET;Server=x",
    'passwd="S3CRET words S3CRET"',
    "passphrase = S3CRET",
    "client_secret=S3CRET&grant_type=x",
    "api-key: S3CRET",
    "X-Api-Key: S3CRET",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=S3CRET/+S3CRET==;EndpointSuffix=x",
    "SharedAccessSignature=S3CRET",
    "Signature=S3CRET",
    "sv=2020&sig=S3CRET%3D",
    "Authorization: Bearer S3CRET",
    "Authorization: AWS4-HMAC-SHA256 Credential=a/b, SignedHeaders=h, Signature=S3CRET",
    'Authorization: Digest username="a", response="S3CRET"',
    "{'Authorization': 'Bearer S3CRET', 'Host': 'x'}",
    "{'authorization': b'Basic S3CRET'}",
    'headers "Proxy-Authorization": "Basic S3CRET"',
    "Cookie: a=S3CRET; b=S3CRET",
    "x-ray-authorization: S3CRET S3CRET",
    "[('Authorization', 'Bearer S3CRET'), (b'cookie', b'a=S3CRET')]",
    "password => 'S3CRET', token := S3CRET, --auth=a:S3CRET",
    "refused Bearer S3CRET.a-b_c",
    "refused Basic S3CRETpz==",
    '{"secret_key": "S3CRET", "region": "eu"}',
    r"{\"private_key\": \"S3CRET\"}",
    '{"private_key": "S3CRET is cut off',
    "{'token': b'S3CRET'}",
    "<Error><SecretAccessKey>S3CRET</SecretAccessKey></Error>",
    "connection_string='a=b;AccountKey=S3CRET'",
    "credentials(secret=S3CRET)",
    "https://S3CRET@host/a",
    "https://user:S3CRET@host/a",
    "s3://key:S3CRET/S3CRET@bucket/a",
    "https://host/a?X-Amz-Signature=S3CRET&b=c",
]
PLAIN = [
    "NoSuchKey: The specified key does not exist.",
    "InvalidAccessKeyId: The AWS Access Key Id you provided does not exist in our records.",
    "SignatureDoesNotMatch: The request signature we calculated does not match",
    "An error occurred (ExpiredToken) when calling the GetObject operation: The provided token has "
    "expired.",
    "The authorization header is malformed; the region 'eu-1' is wrong; expecting 'us-east-1'",
    "Unable to locate credentials",
    "Basic authentication is required, no Bearer token was given",
    "Key=models/a.bin, Bucket=runs",
    "[Errno 2] No such file or directory: '/models/tokenizer.json'",
    "tokenizer: 3 files, max_tokens=5, author=me, passed: 3, monkey: x",
    "https://host:443/path@v1 answered 403, s3://secret://x",
    "Error 111 connecting to localhost:6379. Connection refused.",
    "WRONGPASS invalid username-password pair or user is disabled.",
    "",
]


@pytest.mark.parametrize("text", LEAKS)
def test_a_value_that_is_named_as_secret_is_not_shown(text: str):
    assert "S3CRET" not in without_secrets(text)


@pytest.mark.parametrize("text", PLAIN)
def test_a_text_without_secrets_stays_as_it_is(text: str):
    assert without_secrets(text) == text


def test_what_stands_beside_a_secret_is_shown():
    text = "AccountName=a;AccountKey=S3CRET==;EndpointSuffix=x in <Token>S3CRET</Token> of s3://b/c"
    expected = "AccountName=a;AccountKey=***;EndpointSuffix=x in <Token>***</Token> of s3://b/c"
    assert without_secrets(text) == expected
